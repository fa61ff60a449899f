"""The caller's side: prompts and parameters in, outputs and streams of them out."""
