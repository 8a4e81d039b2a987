"""What runs on the devices: the training step, its configuration and its state."""
