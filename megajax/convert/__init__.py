"""GPT-2 from and to Hugging Face's format."""
