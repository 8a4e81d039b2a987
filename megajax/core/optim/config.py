"""Configuration of the optimizer."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from megajax.core.options import AT_LEAST_ZERO, MOST, SHARE, OneOf, Range, above, between
from megajax.core.traits import OPTIMIZER, OnlyWith, ShrinkRule

_OF_MUON = OnlyWith("name", ("muon",))

OWN = "own"  # an optimizer that Python code gave
OPTIMIZERS: dict[str, Any] = {"adamw": None, "muon": None, OWN: None}
"""By `optimizer.name`: for a registered one, the function that makes it from a schedule (`optim/own.py`)."""
SCHEDULES: dict[str, Any] = dict.fromkeys(("cosine", "linear", "wsd", "inverse-square-root", "constant"))
"""By `optimizer.schedule`: for a registered one, the share of the way from peak to floor that is left, as a function of
the progress of the decay, from 0 to 1."""
Shape = Literal["1-sqrt", "linear", "cosine", "exponential"]


class Horizon(NamedTuple):
    """The steps of a schedule, which a run keeps when it is resumed; 0: none."""

    warmup_steps: int = 0
    decay_steps: int = 0


UNKNOWN = Horizon()  # of a run that begins


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning-rate schedule, ZeRO and skipped steps."""

    name: Annotated[
        str,
        "muon: Muon (orthogonalized momentum) for the matrices of the layers, AdamW for all other weights; own: one "
        "that Python code gave (docs/own.md)",
        OneOf(OPTIMIZERS, {"sgd": 'a plugin has it: megajax.register("optimizer", "sgd", optax.sgd), docs/own.md'}),
        OPTIMIZER,
    ] = "adamw"
    learning_rate: Annotated[float, "peak learning rate, reached at the end of the warm-up", above(0, 1e30)]
    adamw_learning_rate: Annotated[
        float,
        "muon: peak learning rate of the weights updated by AdamW, on the same schedule; 0: that of all",
        between(0, 1e30),
        _OF_MUON,
    ] = 0.0
    decay_steps: Annotated[
        int,
        "step at which the decay reaches the floor, counted from the start; not used by constant "
        "and inverse-square-root; 0: the end of training",
        AT_LEAST_ZERO,
        ShrinkRule(fixed=10),
    ] = 0
    schedule: Annotated[
        str,
        "learning-rate schedule after the warm-up; wsd (warmup-stable-decay) stays at the peak "
        "until the last --optimizer.cooldown-steps",
        OneOf(SCHEDULES),
    ] = "cosine"
    cooldown_steps: Annotated[int, "wsd: length of the decay, which ends at --optimizer.decay-steps", AT_LEAST_ZERO] = 0
    cooldown_shape: Annotated[Shape, "wsd: shape of that decay"] = "1-sqrt"
    warmup_steps: Annotated[int, "steps of linear warm-up", AT_LEAST_ZERO, ShrinkRule(fixed=0)] = 0
    warmup_fraction: Annotated[
        float,
        "warm-up as a share of --optimizer.decay-steps, or of all steps if that is 0; 0: --optimizer.warmup-steps",
        SHARE,
        ShrinkRule(fixed=0.0),
    ] = 0.0
    min_learning_rate: Annotated[
        float, "floor of the learning rate, kept after the decay; not used by constant", between(0, 1000)
    ] = 0.0
    beta1: Annotated[float, "AdamW: decay of the mean of the gradients", SHARE] = 0.9
    beta2: Annotated[float, "AdamW: decay of the mean of their squares", SHARE] = 0.999
    epsilon: Annotated[float, "AdamW: added to the denominator", above(0, 1000)] = 1e-8
    muon_momentum: Annotated[float, "Muon: momentum (Nesterov form)", SHARE, _OF_MUON] = 0.95
    muon_scale: Annotated[
        Literal["spectral", "match-adamw"],
        "Muon: scale of a matrix's update. spectral: max(1, outputs / inputs)^0.5; match-adamw: "
        "0.2 max(outputs, inputs)^0.5, which suits AdamW's learning rates",
        _OF_MUON,
    ] = "match-adamw"
    muon_steps: Annotated[int, "Muon: Newton-Schulz iterations", between(1, 100), _OF_MUON] = 5
    muon_precision: Annotated[
        Literal["compute", "fp32"],
        "Muon: number format of these iterations, that of --precision or fp32 (fp64 with --precision fp64)",
        _OF_MUON,
    ] = "compute"
    weight_decay: Annotated[float, "decoupled weight decay; not applied to norms and biases", between(0, 1000)] = 0.01
    clip_norm: Annotated[float, "clip gradients to this global norm", above(0, 1e30), ShrinkRule(most=0.1)] = 1.0
    zero: Annotated[
        Literal[0, 1, 3],
        "ZeRO stage: 0 shards nothing over data-parallel ranks, 1 shards optimizer state, 3 shards weights too",
    ] = 1
    zero_ranks: Annotated[
        int,
        "data-parallel ranks that ZeRO shards over, the same in every group of as many (HSDP: shards within a server, "
        "replicas between servers); must divide mesh.data; 0: all",
        between(0, 100_000),
        OnlyWith("zero"),
    ] = 0
    overlap_reductions: Annotated[
        Literal["auto", "true", "false"],
        "sum every layer's gradients over data while the last backward pass still computes the layers before it; auto: "
        "on GPUs, if they are large",
    ] = "auto"
    overlap_gathers: Annotated[
        Literal["auto", "true", "false"],
        "ZeRO-1: gather every layer's updated weights while the next step's first forward pass computes the layers "
        "before it; auto: on GPUs, if they are large and layers are not scanned",
    ] = "auto"
    gradient_dtype: Annotated[
        Literal["fp32", "bf16", "fp16"],
        "accumulate gradients in fp32 (fp64 with --precision fp64), or in the format of --precision",
    ] = "fp32"
    skip_above: Annotated[
        float,
        "skip a step whose gradient norm exceeds this multiple of the recent median; 0: never",
        Range(lambda x: x == 0 or 1 < x <= MOST, f"more than 1 and at most {MOST}, or 0: never"),
    ] = 0.0

    @property
    def warmup(self) -> int:
        """Steps of warm-up, once `decay_steps` is known."""
        return self.warmup_steps or round(self.warmup_fraction * self.decay_steps)

    @property
    def horizon(self) -> Horizon:
        """The schedule in steps, once `decay_steps` is known."""
        return Horizon(self.warmup, self.decay_steps)

    def kept_of(self, earlier: "OptimizerConfig | None", model: Horizon = UNKNOWN) -> Horizon:
        """What a resumed run keeps of the horizon of its `earlier` start: the warm-up if it is the same fraction, the
        end of the decay if it is the same schedule. A new run keeps that of a `model` in Python."""
        if earlier is None:
            return model
        same_warmup = 0 < self.warmup_fraction == earlier.warmup_fraction
        same_decay = self.schedule == earlier.schedule
        warmup = earlier.warmup if same_warmup else model.warmup_steps
        return Horizon(warmup, earlier.decay_steps if same_decay else model.decay_steps)

    @property
    def zero_flags(self) -> str:
        """What ZeRO shards, as flags."""
        ranks = f" --optimizer.zero-ranks {self.zero_ranks}" if self.zero_ranks else ""
        return f"--optimizer.zero {self.zero}{ranks}"

    def replicas(self, data: int) -> int:
        """The groups of data-parallel ranks with all of ZeRO's shards each; one if they cannot be equally large."""
        divides = data and self.zero and self.zero_ranks and data % self.zero_ranks == 0
        return data // self.zero_ranks if divides else 1

    @property
    def ends_decay(self) -> bool:
        """Whether the learning rate reaches its floor at `decay_steps`."""
        return self.schedule not in ("constant", "inverse-square-root")


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Dynamic loss scaling for fp16: an overflow of gradients halves the scale, many steps without double it."""

    initial: Annotated[
        float,
        "fp16: initial loss scale",
        Range(lambda x: 1 <= x <= 2**64, "1 to 2^64"),
        ShrinkRule(most=2.0**12),  # below this no gradient of so small a model overflows
    ] = 2.0**16
    growth_every: int = 1000  # steps without overflow before it doubles; no option: `megajax verify` runs only a few
