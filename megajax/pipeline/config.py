"""The pipeline, as configuration."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megajax.options import between
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
