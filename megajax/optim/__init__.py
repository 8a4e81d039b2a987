"""The optimizer: AdamW on sharded weights, and its learning-rate schedule."""
