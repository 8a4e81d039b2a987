"""From text to training batches: documents, tokens, samples, batches. NumPy only, no JAX."""
