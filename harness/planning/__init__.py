"""Which points there are, how long they may take, and the folder and the locks of a run."""
