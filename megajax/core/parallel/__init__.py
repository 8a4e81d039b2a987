"""Tensor (intra-layer) parallelism: the collectives, the sharded layers and vocabulary, layout-independent
randomness."""
