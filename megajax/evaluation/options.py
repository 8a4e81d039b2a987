"""The tasks of `megajax eval` that need no fine-tuning, by name, and their options."""

PRETRAINED = ("lambada", "perplexity", "wikitext103")
OVERLAPPING = ("perplexity", "wikitext103")  # tasks that take `overlap`
PAPER_OVERLAP = 32  # targets by which a window advances (paper §5.3)
