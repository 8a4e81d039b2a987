"""How far a mesh may be from one device, by precision."""

from dataclasses import dataclass

from megajax.verify.comparison import GRADIENT_TOLERANCE, LOSS_TOLERANCE


@dataclass(frozen=True)
class Limits:
    """The largest errors that count as rounding.

    Attributes:
        loss: relative error of a step's loss.
        gradient: ‖error‖ / max(‖leaf‖, floor × global norm) of a leaf's gradient.
        weight: the same for weights after the last step.
    """

    loss: float
    gradient: float
    weight: float


LIMITS = {  # compared with one device in fp64; those of half precision are the parity tests'
    "fp64": Limits(1e-12, 1e-12, 1e-12),
    "fp32": Limits(LOSS_TOLERANCE, GRADIENT_TOLERANCE, GRADIENT_TOLERANCE),
    "fp16": Limits(2e-5, 5e-3, 5e-3),
    "bf16": Limits(2e-4, 4e-2, 4e-2),
}
