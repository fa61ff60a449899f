"""One request: its parameters, its state and text, and why it ends."""
