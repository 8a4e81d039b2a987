"""The training loop, and everything that shows its progress."""
