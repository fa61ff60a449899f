"""Where a question gets more than its sweep in conf/experiment: a summary and a figure."""
