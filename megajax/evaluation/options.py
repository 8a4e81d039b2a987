"""The tasks of `megajax eval` that need no fine-tuning, by name, and what they take."""

PRETRAINED = ("lambada", "perplexity", "wikitext103")
OVERLAPPING = ("perplexity", "wikitext103")  # which take `overlap`
PAPER_OVERLAP = 32  # targets that a window advances by (paper §5.3)
