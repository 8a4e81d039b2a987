"""Two traces held against each other by the project's rule."""

import math
from dataclasses import dataclass

import numpy as np

from megajax.verify.gradient_run import Trace

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5
GRADIENT_FLOOR = 1e-3


@dataclass(frozen=True)
class Comparison:
    """How far a trace is from the reference.

    Attributes:
        loss_error: largest relative error of a step's loss.
        gradient_error: largest ‖error‖ / max(‖leaf‖, floor × global norm) of a gradient leaf in any step.
        worst_leaf: the leaf that has it.
    """

    loss_error: float
    gradient_error: float
    worst_leaf: str

    def within(self, scale: float = 1.0) -> bool:
        """Whether both errors are within the fp32 tolerances times `scale`."""
        return self.loss_error <= LOSS_TOLERANCE * scale and self.gradient_error <= GRADIENT_TOLERANCE * scale


def compare(reference: Trace, other: Trace) -> Comparison:
    """The largest errors of `other` over all steps; see `Comparison`. A NaN anywhere counts as an infinite error."""
    assert len(reference.losses) == len(other.losses)
    loss_errors = [abs(b - a) / abs(a) for a, b in zip(reference.losses, other.losses, strict=True)]
    worst, worst_leaf = -1.0, ""
    for expected, actual in zip(reference.gradients, other.gradients, strict=True):
        assert expected.keys() == actual.keys()
        floor = GRADIENT_FLOOR * math.sqrt(sum(norm(leaf) ** 2 for leaf in expected.values()))
        for name, leaf in expected.items():
            error = norm(actual[name].astype(np.float64) - leaf) / max(norm(leaf), floor)
            error = math.inf if math.isnan(error) else error
            if error > worst:
                worst, worst_leaf = error, name
    return Comparison(max(math.inf if math.isnan(e) else e for e in loss_errors), worst, worst_leaf)


def norm(x: np.ndarray) -> float:
    """Of all numbers, in double precision."""
    return float(np.linalg.norm(x.astype(np.float64)))
