"""Kernels, each with its PyTorch reference in the same file."""
