"""What may be asked for: command lines, presets, experiments, the checked configuration."""
