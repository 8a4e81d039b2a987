"""The training loop, and what people who watch it see."""
