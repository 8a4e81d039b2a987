"""All names of JAX that we use although they are not public, each with the public alternative that we hope for."""

from collections.abc import Callable
from typing import Any

import jax


def expansion(params: dict[str, Any]) -> Callable[..., Any]:
    """What the primitive `call_hi_primitive` with these parameters stands for, which JAX traces from version 0.12 on.
    Hoped for: a public way to lower such a jaxpr to one without them."""
    whole = params["_prim"]
    return lambda *args: whole.expand(*jax.tree.unflatten(whole.in_tree, args))
