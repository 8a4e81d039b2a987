"""From presets and flags to a checked configuration, and to the processes and devices it asks for."""
