"""What a run leaves on disk: its directory, data, checkpoints and metrics."""
