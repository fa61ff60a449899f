"""One file a question: what a finished run says to it, as a table, a figure and a finding."""
