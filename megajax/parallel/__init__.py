"""Tensor (intra-layer) parallelism: the collectives, the split layers, the split vocabulary, layout-independent
randomness."""
