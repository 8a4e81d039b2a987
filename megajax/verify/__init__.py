"""Check whether the mesh changes the results, and what a program communicates. Tests and users run the same code.

`trace` trains a few steps and returns losses and gradients in mesh-independent form; `compare` compares two traces with
the project's tolerances. `collectives` lists a program's communication from its jaxpr, without running or compiling it.
"""

from megajax.core.program.communication import COLLECTIVES, Collective, collectives, collectives_of
from megajax.verify.check import check
from megajax.verify.comparison import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    CompiledComparison,
    Trace,
    compare,
    named_leaves,
    trace,
)
from megajax.verify.verdict import Finding, Verdict

__all__ = [
    "COLLECTIVES", "GRADIENT_TOLERANCE", "LOSS_TOLERANCE", "Collective", "CompiledComparison", "Finding", "Trace",
    "Verdict", "check", "collectives", "collectives_of", "compare", "named_leaves", "trace",
]  # fmt: skip
