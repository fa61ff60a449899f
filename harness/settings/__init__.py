"""What may be asked for: command lines, presets, experiments, the checked configuration.

Beside it what other engines can be asked for (abilities), and what became of it (effective).
"""
