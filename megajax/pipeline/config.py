"""The pipeline, as configuration."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megajax.options import MOST, between
from megajax.pipeline.deferral import Deferring, PassTimes
from megajax.pipeline.schedule import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How microbatches move through the stages."""

    schedule: Annotated[
        Literal[tuple(sorted(SCHEDULES))],  # type: ignore[valid-type]  # every function there is
        "order of the forwards and backwards",
    ] = "1f1b"
    chunks: Annotated[
        int, "pieces of the model on every stage; interleaved: 2 or more, others: 1", between(1, 10_000)
    ] = 1
    vocabulary: Annotated[
        Literal["replicated", "split"], "embedding and head on the first and last stage, or split over all stages"
    ] = "replicated"
    weight_gradients: Annotated[
        Literal["together", "deferred"],
        "computed with the gradients of the inputs, or later, where a stage would be idle (docs/pipelines.md)",
    ] = "together"
    max_deferred: Annotated[
        int,
        "chunks of a stage whose weight gradients may wait at once; -1: as many as help, at most 2 (mesh.pipe - 1)",
        between(-1, MOST),
    ] = -1

    def deferring(self, times: PassTimes | None = None) -> Deferring | None:
        """How weight gradients are deferred, placed by `times` (all 1 if not given); None if they are not."""
        if self.weight_gradients == "together":
            return None
        return Deferring(times or PassTimes(), None if self.max_deferred < 0 else self.max_deferred)
