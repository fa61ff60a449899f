"""Helpers that several tests share: ranks as threads, tiny checkpoints, hand-made batches."""
