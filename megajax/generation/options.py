"""What `megajax generate` can be asked for. Every field is a flag."""

from dataclasses import dataclass
from typing import Annotated

from megajax.options import AT_LEAST_ZERO, SEED, Range, between


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How texts are continued."""

    max_tokens: Annotated[int, "tokens that a prompt gets at most"] = 64
    temperature: Annotated[float, "0: always the most probable token; higher is more random", AT_LEAST_ZERO] = 0.8
    top_k: Annotated[int, "choose among the k most probable tokens; 0: all", AT_LEAST_ZERO] = 0
    top_p: Annotated[
        float,
        "choose among the most probable tokens that together have this probability",
        Range(lambda x: 0 < x <= 1, "more than 0 and at most 1"),
    ] = 1.0
    seed: Annotated[int, "of the random choice", SEED] = 0
    batch: Annotated[int, "prompts that are continued at once", between(1, 100_000)] = 8
