"""What whole texts say of continuations: their log-probabilities, and with `--bitwise` which ids they choose.

A cache's products have other shapes than those of a whole text, and so round otherwise. The pass here is that of
scoring and of training: one row at a time, `model.sequence_length` tokens long. What the cache continues is a draft for
it (Leviathan et al., arXiv 2211.17192, with the model as its own draft). Letters: B batch, T tokens, N new ids, V
vocabulary.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from megajax.core.axes import ROW_AXES
from megajax.core.batch import text_form
from megajax.core.config import MODELS_OWN
from megajax.core.mesh import ROWS
from megajax.core.parallel.collectives import gather_shards
from megajax.core.parallel.random import RandomBits
from megajax.core.program.program import BATCH, Batch, Program, vocabulary_axes
from megajax.core.program.scoring import logits_of_rows, scores
from megajax.core.trees import Tree
from megajax.generation.choice import Sampling, choose, seen_tokens
from megajax.host.phases import phase

_Text = Sequence[int]


class WholeTexts:
    """The forward pass of whole texts, a row on each device at a time.

    Attributes:
        params: the program's weights.
        first_seconds: what the first pass of each kind has taken, which compiles.
    """

    def __init__(self, program: Program, sampling: Sampling):
        train = dataclasses.replace(
            program.config.train, global_batch=program.config.mesh.row_shards, microbatch=1, loss=MODELS_OWN
        )
        config = dataclasses.replace(program.config, train=train)
        self._program = Program(config, program.mesh, program.backend, program.operand_dtype)
        self._sampling = sampling
        self.params: Tree = None
        self.first_seconds = 0.0
        self._count, self._called = 1, set[Any]()

    def _pass(self, kind: Any, function: Callable, *given: Any) -> np.ndarray:
        """What a pass of whole texts gives, in host memory."""
        if kind in self._called:
            return np.asarray(function(self.params, *given))
        self._called.add(kind)
        began = time.perf_counter()
        with phase("compiling generation, whole texts"):
            found = np.asarray(function(self.params, *given))
        self.first_seconds += time.perf_counter() - began
        return found

    def logprobs(self, prompts: Sequence[_Text], new: Sequence[_Text]) -> list[list[float]]:
        """The log-probability of every new id after a prompt, in nats: minus its loss in training."""
        found = list[list[float]]()
        for rows, batch in self._batches(prompts, new):
            losses_BT = self._pass("scores", _losses(self._program), batch).astype(np.float64)
            places = (slice(len(prompts[row]) - 1, len(prompts[row]) - 1 + len(new[row])) for row in rows)
            found += [(0.0 - of_row[place]).tolist() for of_row, place in zip(losses_BT, places, strict=True)]
        return found[: len(prompts)]

    def choices(
        self, prompts: Sequence[_Text], drafts: Sequence[_Text], most: Sequence[int], bits: RandomBits
    ) -> list[list[int]]:
        """The id that is chosen after every prompt and after every id of its draft, at most so many. Choices after the
        first that is not the draft's are of another text."""
        longest = min(max(map(len, drafts)) + 1, max(most))
        self._count, chosen = max(self._count, 1 << (longest - 1).bit_length()), list[list[int]]()
        program, specs = self._program, (self._program.layout.computed_specs, BATCH, ROWS, ROWS)
        for rows, batch in self._batches(prompts, drafts):
            first = np.array([len(prompts[row]) - 1 for row in rows], np.int32)
            own = jax.tree.map(lambda word, rows=rows: np.asarray(word)[rows], bits)
            run = program.compiled(_choices, specs, PartitionSpec(), self._sampling, self._count)
            found_BN = self._pass(self._count, run, batch, own, first)
            counts = (min(len(drafts[row]) + 1, most[row]) for row in rows)
            chosen += [of_row[:count].tolist() for of_row, count in zip(found_BN, counts, strict=True)]
        return chosen[: len(prompts)]

    def _batches(self, prompts: Sequence[_Text], new: Sequence[_Text]) -> Iterator[tuple[list[int], Batch]]:
        """As many texts at a time as there are devices for rows, by number, filled up with copies of the last one."""
        size, length = self._program.config.train.global_batch, self._program.config.model.sequence_length
        for start in range(0, len(prompts), size):
            numbers = [min(number, len(prompts) - 1) for number in range(start, start + size)]
            arrays: dict[str, Any] = text_form().padding(size, tokens=length)
            for row, number in enumerate(numbers):
                text = [*prompts[number], *new[number]]
                arrays["tokens"][row, : len(text)] = text[:length]
                arrays["targets"][row, : len(text) - 1] = text[1:]
            own = self._program.local_rows
            yield numbers, self._program.put_batch({name: array[own] for name, array in arrays.items()}, own)


def _losses(program: Program) -> Callable[..., Array]:
    return lambda params, batch: scores(program)(params, batch)["next_token"][0]


def _choices(
    program: Program, sampling: Sampling, count: int, params: Tree, batch: Batch, bits_B: RandomBits, first_B: Array
) -> Array:
    """What is chosen after `count` tokens from the one at `first` on, [B, N]."""
    size, tokens_BT = program.config.model.vocab_size, batch["tokens"]
    place_NB = first_B[None] + jnp.arange(count, dtype=jnp.int32)[:, None]
    place_NB = jnp.minimum(place_NB, tokens_BT.shape[1] - 1)
    columns_BNV = jnp.take_along_axis(logits_of_rows(program, params, batch), place_NB.T[..., None], axis=1)
    logits_NBV = gather_shards(columns_BNV, 2, vocabulary_axes(program.config), invariant=True).swapaxes(0, 1)

    def chosen(at: tuple[Array, Array]) -> Array:
        place_B, logits_BV = at
        seen_BV = seen_tokens(tokens_BT, place_B + 1, size) if sampling.penalizes else None
        return choose(logits_BV[:, :size], bits_B, place_B + 1, sampling, seen_BV)

    found_NB = lax.map(chosen, (place_NB, logits_NBV))
    return gather_shards(found_NB.T, 0, ROW_AXES, invariant=True)
