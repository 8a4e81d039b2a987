"""What a run leaves on disk: its directory, its data, checkpoints and figures."""
