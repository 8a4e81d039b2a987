"""GPT-2 (Radford et al., 2019), as the paper trains it."""
