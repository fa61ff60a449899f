"""One measured window: what is asked, what is recorded, and what comes of the records."""
