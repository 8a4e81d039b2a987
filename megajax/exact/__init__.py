"""Whether two programs compute the same, exactly: numbers are elements of finite fields, which are never rounded
(`numbers.py`), and nothing is compiled (`interpreter.py`)."""

from megajax.exact.compare import Comparison, assert_equal, compare, over_meshes

__all__ = ["Comparison", "assert_equal", "compare", "over_meshes"]
