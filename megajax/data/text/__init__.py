"""From raw text to tokens: readers and tokenizers."""
