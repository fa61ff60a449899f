"""Measures an engine: plans points, runs them, and leaves long tables."""
