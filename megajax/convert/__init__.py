"""Models from and to Hugging Face's format: `exchange.py` says what a family needs, `families.py` lists them."""
