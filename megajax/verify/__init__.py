"""Does the mesh change the numbers, and what does the program communicate? The same code answers tests and users.

`trace` trains a few steps and keeps every loss and gradient in mesh-independent form; `compare` holds two traces
against each other by the project's rule. `collectives` lists the communication of a program from its jaxpr, without
running or compiling it.
"""

from megajax.program.communication import COLLECTIVES, Collective, collectives, collectives_of
from megajax.verify.check import check
from megajax.verify.comparison import GRADIENT_TOLERANCE, LOSS_TOLERANCE, Comparison, compare
from megajax.verify.gradient_run import Trace, named_leaves, trace
from megajax.verify.verdict import Finding, Verdict

__all__ = [
    "COLLECTIVES",
    "GRADIENT_TOLERANCE",
    "LOSS_TOLERANCE",
    "Collective",
    "Comparison",
    "Finding",
    "Trace",
    "Verdict",
    "check",
    "collectives",
    "collectives_of",
    "compare",
    "named_leaves",
    "trace",
]
