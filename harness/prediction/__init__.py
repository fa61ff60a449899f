"""Step times of TP sizes, batches and models that nobody measured, each with its error."""
