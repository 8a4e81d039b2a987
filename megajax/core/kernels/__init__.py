"""Our own GPU kernels, in Pallas' Mosaic GPU. They take plain arrays and know nothing of models."""
