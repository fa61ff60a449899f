"""What this machine is, holds and can run, and what its GPUs say of themselves."""
