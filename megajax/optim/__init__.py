"""The optimizer: AdamW on sharded weights, its learning rate, the loss scale of fp16, and which steps are taken."""
