"""Ranks in threads, processes and nodes, and the messages between them and the caller."""
