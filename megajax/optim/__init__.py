"""The optimizer: AdamW or Muon on sharded weights, its learning rate, the loss scale of fp16, which steps are taken."""
