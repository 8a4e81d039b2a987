"""Configuration of the pipeline. No JAX here."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megajax.core.options import OneOf, Range, between, is_whole
from megajax.core.pipeline.deferral import PassTimes
from megajax.core.pipeline.schedule import SCHEDULES


def _are_layers(text: str) -> bool:
    """Whether a text is a valid `layers`."""
    return text in ("even", "auto") or all(map(is_whole, text.split(",")))


_ZERO_BUBBLE = "1f1b, with --pipeline.weight-gradients deferred"


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline schedule."""

    schedule: Annotated[
        str,
        "pipeline schedule",
        OneOf(SCHEDULES, dict.fromkeys(("zb", "zb-h1", "zbh1", "zero-bubble"), _ZERO_BUBBLE)),
    ] = "1f1b"
    chunks: Annotated[int, "model chunks per stage; interleaved: 2 or more, others: 1", between(1, 10_000)] = 1
    vocabulary: Annotated[
        Literal["replicated", "split"],
        "keep embedding and head on the first and last stage, or shard them over all stages",
    ] = "replicated"
    layers: Annotated[
        str,
        "layers of every stage: even; auto: by predicted times, so that the stage with the head gets fewer; or "
        "N,N,... of the virtual stages chunk * mesh.pipe + stage in this order (docs/pipelines.md)",
        Range(_are_layers, "even, auto, or numbers of layers separated by commas, such as 9,9,8,6"),
    ] = "even"
    weight_gradients: Annotated[
        Literal["together", "deferred"],
        "compute weight gradients together with input gradients, or defer them to where a stage "
        "would be idle (docs/pipelines.md)",
    ] = "together"
    paired_microbatches: Annotated[
        bool,
        "compile two microbatches (with mesh.pipe, two ticks) in each iteration of the loop: on GPUs, collectives of "
        "one overlap with products of the other, which needs memory for the activations of both",
    ] = False

    @property
    def counts(self) -> tuple[int, ...]:
        """The layers of every virtual stage if `layers` are numbers, else none."""
        return () if self.layers in ("even", "auto") else tuple(map(int, self.layers.split(",")))

    def deferring(self, times: PassTimes | None = None) -> PassTimes | None:
        """The times by which deferred weight gradients are placed (1 each by default); None if none are deferred."""
        return None if self.weight_gradients == "together" else times or PassTimes()
