"""From presets and flags to a checked configuration."""
