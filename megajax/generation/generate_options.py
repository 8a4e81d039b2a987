"""The options of `megajax generate`; every field is a flag."""

from dataclasses import dataclass
from typing import Annotated, Any

from megajax.core.errors import UserError
from megajax.core.options import AT_LEAST_ZERO, SEED, Range, above, between
from megajax.host.reading import parse_json


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How to continue texts."""

    max_tokens: Annotated[int, "most tokens to generate per prompt"] = 64
    temperature: Annotated[
        float, "0: always pick the most probable token; higher values are more random", AT_LEAST_ZERO
    ] = 0.8
    top_k: Annotated[int, "sample from the k most probable tokens; 0: all", AT_LEAST_ZERO] = 0
    top_p: Annotated[
        float,
        "sample from the most probable tokens whose probabilities sum to this",
        Range(lambda x: 0 < x <= 1, "more than 0 and at most 1"),
    ] = 1.0
    min_p: Annotated[
        float, "sample from the tokens that are at least this times as probable as the most probable one", between(0, 1)
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        "divide positive logits of tokens in the prompt and in the continuation so far by this, and multiply negative "
        "ones; 1: off",
        above(0, 1000),
    ] = 1.0
    stop: Annotated[
        tuple[str, ...],
        "end a continuation before the first of these texts",
        Range(lambda given: given != "" and "" not in tuple(given), "one character or more"),
    ] = ()
    logprobs: Annotated[
        bool, "also give the log-probability of every new token, as scoring the whole text gives it"
    ] = False
    seed: Annotated[int, "random seed", SEED] = 0
    batch: Annotated[int, "prompts per batch", between(1, 100_000)] = 8


def template_args(text: str, name: str) -> dict[str, Any]:
    """Variables of a chat template from a JSON object; none from an empty text. Messages call it `name`."""
    from megajax.data.text.chat import checked_args

    try:
        args = parse_json(text or "{}")
    except ValueError as error:
        valid = 'a JSON object, as in {"enable_thinking": false}'
        raise UserError(f"{name}: not JSON: {error}; valid: {valid}") from None
    return checked_args(args, name)
