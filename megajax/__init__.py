"""Megatron-LM rebuilt on JAX: transformers pretrained on a (data, pipe, tensor) mesh."""

__version__ = "0.1.0"
