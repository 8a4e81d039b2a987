"""BERT (Devlin et al., 2018), pretrained as in the paper: masked tokens, and the order of two segments."""
