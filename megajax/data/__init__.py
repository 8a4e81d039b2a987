"""Text to training batches: documents, tokens, samples, batches. NumPy only, no JAX."""
