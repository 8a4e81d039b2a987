"""Whether two JAX functions compute the same, exactly: the package `jaxequal` (exact/), which is also a distribution of
its own."""

from jaxequal import Comparison, assert_equal, compare, over_meshes

__all__ = ["Comparison", "assert_equal", "compare", "over_meshes"]
