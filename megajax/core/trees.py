"""Types of nested dicts."""

from typing import Any

Tree = Any  # of arrays, or of anything else that is known of each
Path = tuple[str, ...]  # to a leaf
