"""From presets and flags to a checked configuration, and the processes and devices it asks for."""
