"""A corpus from raw text: cleaned, without duplicates and test sets, tokenized (paper §4.1). NumPy only, no JAX."""
