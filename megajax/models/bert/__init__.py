"""BERT (Devlin et al., 2018), as the paper trains it: masked tokens, and the order of two segments."""
