"""Kernels of our own for GPUs, in Pallas' Mosaic GPU. They take plain arrays and know nothing of models."""
