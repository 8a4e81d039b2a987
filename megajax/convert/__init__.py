"""Models from and to the Hugging Face format: `exchange.py` says what a family needs, `families.py` lists them."""
