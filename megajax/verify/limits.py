"""How far a mesh may be from one device, by precision."""

from dataclasses import dataclass

from megajax.verify.comparison import GRADIENT_TOLERANCE, LOSS_TOLERANCE


@dataclass(frozen=True)
class Limits:
    """The largest errors that are rounding.

    Attributes:
        loss: relative, of a step.
        gradient: of a leaf's gradient: ‖error‖ / max(‖leaf‖, floor × global norm).
        weight: the same of its weights after the last step.
    """

    loss: float
    gradient: float
    weight: float


LIMITS = {  # against one device in fp64; of half precision they are what the tests of the parity allow
    "fp64": Limits(1e-12, 1e-12, 1e-12),
    "fp32": Limits(LOSS_TOLERANCE, GRADIENT_TOLERANCE, GRADIENT_TOLERANCE),
    "fp16": Limits(2e-5, 5e-3, 5e-3),
    "bf16": Limits(2e-4, 4e-2, 4e-2),
}
