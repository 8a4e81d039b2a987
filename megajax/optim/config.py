"""How weights are updated, as configuration."""

from dataclasses import dataclass
from typing import Annotated, Literal


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its learning-rate schedule, where its state is kept, and which steps it skips."""

    learning_rate: Annotated[float, "peak, reached at the end of the warm-up"]
    decay_steps: Annotated[int, "step at which the decay reaches the floor, warm-up included; constant: not used"]
    schedule: Annotated[
        Literal["cosine", "linear", "constant"], "way of the learning rate from the peak down to the floor"
    ] = "cosine"
    warmup_steps: Annotated[int, "steps of linear warm-up from 0"] = 0
    min_learning_rate: Annotated[float, "floor, kept after the decay; constant: not used"] = 0.0
    beta1: Annotated[float, "decay of the mean of the gradients"] = 0.9
    beta2: Annotated[float, "decay of the mean of their squares"] = 0.999
    epsilon: Annotated[float, "added to the denominator"] = 1e-8
    weight_decay: Annotated[float, "decoupled; not on LayerNorm and biases"] = 0.01
    clip_norm: Annotated[float, "largest global norm of the gradients"] = 1.0
    zero: Annotated[
        Literal[0, 1, 3],
        "what is split over data: 0 nothing, 1 main weights and moments, 3 also the weights that layers compute with",
    ] = 1
    gradient_dtype: Annotated[
        Literal["fp32", "bf16", "fp16"], "gradients are summed in this: fp32 (fp64 with it), or that of --precision"
    ] = "fp32"
    skip_above: Annotated[
        float, "skip a step whose gradient norm is more than this times the median of recent ones; 0: none"
    ] = 0.0
    max_skipped: Annotated[int, "most steps in a row that are skipped; one more ends the run"] = 20


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Dynamic loss scaling of fp16: the scale shrinks when gradients overflow, and grows when they long did not."""

    initial: Annotated[float, "scale at the start"] = 2.0**16
    growth: Annotated[float, "factor of growth"] = 2.0
    growth_every: Annotated[int, "good steps in a row before it grows"] = 1000
    backoff: Annotated[float, "factor after an overflow"] = 0.5
    floor: Annotated[float, "smallest scale"] = 1.0
