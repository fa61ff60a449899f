"""Runs a plan: engines in child processes, the passes of each point, the progress said."""
