"""A forward's tensors: preallocated, filled from a step's plan, ids read back."""
