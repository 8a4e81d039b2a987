"""`model.window_layers` and `model.linear_layers`: which layers have the sliding window, or linear attention. No JAX
here.

A text is `all`, or how many layers have it, how many do not, how many have it, …, repeated to the last layer.
"""

import re
from collections.abc import Sequence
from itertools import cycle, groupby, islice

ALL = "all"


def are_turns(text: str) -> bool:
    """Whether a text says which layers have it."""
    return text == ALL or (re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text) is not None and any(_numbers(text)))


def in_each_layer(text: str, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has it, from the first to the last."""
    return tuple(islice(cycle(_kinds([1] if text == ALL else _numbers(text))), num_layers))


def in_turns(have: Sequence[bool]) -> str:
    """The shortest text for layers that have it or not; the inverse of `in_each_layer`."""
    if all(have):
        return ALL
    runs = [0] * (not have[0]) + [len(list(run)) for _, run in groupby(have)]
    repeated = (runs[:number] for number in range(2, len(runs), 2))
    fits = (turns for turns in repeated if (*islice(cycle(_kinds(turns)), len(have)),) == (*have,))
    return ",".join(map(str, next(fits, runs)))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _kinds(turns: Sequence[int]) -> list[bool]:
    return [turn % 2 == 0 for turn, number in enumerate(turns) for _ in range(number)]
