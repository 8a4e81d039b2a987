"""Whether two JAX programs compute the same, exactly: numbers are elements of finite fields, which are never rounded
(`numbers.py`), and nothing is compiled (`interpreter.py`). JAX is not imported before it is used."""

import importlib
from typing import TYPE_CHECKING, Any

from jaxequal.errors import RunError, UserError

__all__ = ["Comparison", "RunError", "UserError", "assert_equal", "compare", "over_meshes"]

if TYPE_CHECKING:
    from jaxequal.comparison import Comparison, assert_equal, compare, over_meshes
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("jaxequal.comparison"), name)
