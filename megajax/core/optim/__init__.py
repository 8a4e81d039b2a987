"""The optimizer: AdamW or Muon on sharded weights, the learning rate, fp16's loss scale, and skipped steps."""
