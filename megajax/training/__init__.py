"""Training: the state, the compiled step, the loop, checkpoints and the run's log."""
