"""A corpus from raw text: cleaned, without duplicates and test sets, tokenized (paper §5.2). NumPy only, no JAX."""
