"""The optimizer, as configuration."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megajax.errors import UserError
from megajax.options import AT_LEAST_ZERO, MOST, POSITIVE_SHARE, SHARE, Range, above, between
from megajax.traits import OPTIMIZER, ReadWith, Small

_OF_MUON = ReadWith("name", ("muon",))
_COEFFICIENT = between(-1000, 1000)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW or Muon, the learning-rate schedule, where the state is kept, and which steps are skipped."""

    name: Annotated[
        Literal["adamw", "muon"],
        "muon: matrices of layers by Muon (orthogonalised momentum), all other weights by AdamW",
        OPTIMIZER,
    ] = "adamw"
    learning_rate: Annotated[float, "peak, reached at the end of the warm-up", above(0, 1e30)]
    adamw_learning_rate: Annotated[
        float,
        "of muon: peak of the weights that are AdamW's, which follows the same course; 0: learning_rate",
        between(0, 1e30),
        _OF_MUON,
    ] = 0.0
    decay_steps: Annotated[
        int,
        "step at which the decay reaches the floor, warm-up included; constant and inverse-square-root: not used; "
        "0: train.steps, or the end of train.epochs",
        AT_LEAST_ZERO,
        Small(fixed=10),
    ] = 0
    schedule: Annotated[
        Literal["cosine", "linear", "wsd", "inverse-square-root", "constant"],
        "way of the learning rate from the peak down to the floor; wsd (warm-up, stable, decay): it stays at the peak "
        "until the last cooldown_steps",
    ] = "cosine"
    cooldown_steps: Annotated[
        int, "of wsd: how many steps the decay takes, which ends at decay_steps", AT_LEAST_ZERO
    ] = 0
    cooldown_shape: Annotated[
        Literal["1-sqrt", "linear", "cosine", "exponential"], "of wsd: how the learning rate falls in these steps"
    ] = "1-sqrt"
    warmup_steps: Annotated[int, "steps of linear warm-up from 0", AT_LEAST_ZERO, Small(fixed=0)] = 0
    warmup_fraction: Annotated[
        float,
        "the same as a share of decay_steps, or where that is 0 of all steps; 0: warmup_steps",
        SHARE,
        Small(fixed=0.0),
    ] = 0.0
    min_learning_rate: Annotated[float, "floor, kept after the decay; constant: not used", between(0, 1000)] = 0.0
    beta1: Annotated[float, "decay of the mean of the gradients", SHARE] = 0.9
    beta2: Annotated[float, "decay of the mean of their squares", SHARE] = 0.999
    epsilon: Annotated[float, "added to the denominator", above(0, 1000)] = 1e-8
    muon_momentum: Annotated[float, "decay of Muon's mean of the gradients (Nesterov's form)", SHARE, _OF_MUON] = 0.95
    muon_scale: Annotated[
        Literal["spectral", "match-adamw"],
        "what a matrix's update is multiplied by: spectral: max(1, outputs / inputs)^0.5; match-adamw: "
        "0.2 max(outputs, inputs)^0.5, about as large as AdamW's, so that its learning rate fits",
        _OF_MUON,
    ] = "match-adamw"
    muon_steps: Annotated[int, "Newton-Schulz steps of Muon's", between(1, 100), _OF_MUON] = 5
    muon_a: Annotated[float, "X becomes (a + b A + c A A) X in each, of A = X X'", _COEFFICIENT, _OF_MUON] = 3.4445
    muon_b: Annotated[float, "see muon_a", _COEFFICIENT, _OF_MUON] = -4.775
    muon_c: Annotated[float, "see muon_a", _COEFFICIENT, _OF_MUON] = 2.0315
    muon_precision: Annotated[
        Literal["compute", "fp32"], "of these steps: that of --precision, or fp32 (fp64 with it)", _OF_MUON
    ] = "compute"
    weight_decay: Annotated[float, "decoupled; not on LayerNorm and biases", between(0, 1000)] = 0.01
    clip_norm: Annotated[float, "largest global norm of the gradients", above(0, 1e30), Small(most=0.1)] = 1.0
    zero: Annotated[
        Literal[0, 1, 3],
        "what is split over data: 0 nothing, 1 main weights and moments, 3 also the weights that layers compute with",
    ] = 1
    gradient_dtype: Annotated[
        Literal["fp32", "bf16", "fp16"], "gradients are summed in this: fp32 (fp64 with it), or that of --precision"
    ] = "fp32"
    skip_above: Annotated[
        float,
        "skip a step whose gradient norm is more than this times the median of recent ones; 0: none",
        Range(
            lambda x: x == 0 or 1 < x <= MOST, f"more than 1 and at most {MOST}, or 0: no step is skipped for its norm"
        ),
    ] = 0.0
    max_skipped: Annotated[int, "most steps in a row that are skipped; one more ends the run", AT_LEAST_ZERO] = 20

    @property
    def warmup(self) -> int:
        """Steps of warm-up, where `decay_steps` is known."""
        return self.warmup_steps or round(self.warmup_fraction * self.decay_steps)

    @property
    def ends_decay(self) -> bool:
        """Whether the learning rate reaches its floor at `decay_steps`."""
        return self.schedule not in ("constant", "inverse-square-root")


_SCALE = Range(lambda x: 0 < x <= 2**64, "more than 0 and at most 2^64")
_SMALL_SCALE = Small(most=2.0**12)  # under which no gradient of so small a model overflows


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Dynamic loss scaling of fp16: the scale shrinks when gradients overflow, and grows after many steps without."""

    initial: Annotated[float, "scale at the start", _SCALE, _SMALL_SCALE] = 2.0**16
    growth: Annotated[float, "factor of growth", above(1, 65536)] = 2.0
    growth_every: Annotated[int, "good steps in a row before it grows", Small(most=2)] = 1000
    backoff: Annotated[float, "factor after an overflow", POSITIVE_SHARE] = 0.5
    floor: Annotated[float, "smallest scale", _SCALE, _SMALL_SCALE] = 1.0


def check_cooldown(optimizer: OptimizerConfig) -> None:
    """Check that `wsd`, and no other schedule, has cooldown steps, which fit between warm-up and decay."""
    given = f"--optimizer.cooldown-steps {optimizer.cooldown_steps}"
    if optimizer.schedule != "wsd":
        if optimizer.cooldown_steps:
            raise UserError(
                f"{given} with --optimizer.schedule {optimizer.schedule}; valid: --optimizer.schedule wsd, or 0"
            )
        return
    end, warmup = optimizer.decay_steps, optimizer.warmup
    most = max(1, end - warmup) if end else MOST
    if not 1 <= optimizer.cooldown_steps <= most:
        why = f", which ends at --optimizer.decay-steps {end} after {warmup} steps of warm-up" if end else ""
        raise UserError(f"{given} with --optimizer.schedule wsd{why}; valid: 1 to {most}")
