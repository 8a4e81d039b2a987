"""Generation with a KV cache on a mesh without a pipe (`programs.py`).

There are two compiled programs for each shape of a batch: one prefills the prompts and chooses the first tokens, one
chooses up to `TOKENS_AT_ONCE` more without the host in between. Letters: B batch, N tokens per dispatch.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from megajax.core.batch import IGNORED
from megajax.core.errors import UserError
from megajax.core.mesh import shardings
from megajax.core.models.registry import FAMILIES
from megajax.core.parallel.random import RandomBits
from megajax.core.program.program import Program
from megajax.core.trees import Tree
from megajax.generation.choice import Sampling, prompt_bits
from megajax.generation.programs import ROWS, TOKENS_AT_ONCE, DecodingPrograms, State
from megajax.generation.whole_texts import WholeTexts
from megajax.host.phases import phase

SHORTEST = 16  # prompts are padded to this length or the next power of two, so that few lengths are compiled


Stop = Literal["end", "stop", "length", "context"]
_New = dict[int, tuple[list[int], Stop | None, list[float]]]  # by row, as in `Piece`


class Piece(NamedTuple):
    """Some new ids of one continuation."""

    number: int  # of the prompt, from 0
    ids: list[int]
    stopped_by: Stop | None  # why these are the last: an end id, a stop, the requested number, or the context
    logprobs: list[float]  # the log-probability of each id, in nats, if it was asked for


class Decoder:
    """A model that continues prompts, on the mesh of a program without a pipe. All processes make one, call its methods
    together and get the same ids."""

    def __init__(
        self, program: Program, params: Tree, sampling: Sampling, ends: Collection[int], *, logprobs: bool = False
    ):
        """`params` are the program's; a continuation ends before any of the ids in `ends`; with `logprobs` its ids have
        log-probabilities."""
        self._config, self._mesh = program.config.model, program.mesh
        if not FAMILIES[self._config.family].generates:
            valid = "layers that do, megajax.Family(…, generates=True)"
            raise UserError(f"--model.family {self._config.family}: its layers keep no cache; valid: {valid}")
        self._row_shards = program.config.mesh.batch_shards
        self._sampling, self._on_devices = sampling, DecodingPrograms(program, sampling, ends)
        of_weights = jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), self._on_devices.specs)
        self._unstack = jax.jit(self._on_devices.unstacked, out_shardings=of_weights)
        self._ends, self._logprobs, self._bitwise = frozenset(ends), logprobs, program.config.bitwise > 0
        self._whole = WholeTexts(program, sampling) if logprobs or self._bitwise else None
        self._programs: dict[tuple, Callable] = {}
        self._compile_seconds = 0.0
        self.renew(params)

    @property
    def compile_seconds(self) -> float:
        """So far, with the first passes of whole texts."""
        return self._compile_seconds + (self._whole.first_seconds if self._whole else 0.0)

    def renew(self, params: Tree) -> None:
        """Continue with other weights of the same program."""
        self._weights = self._unstack(params)
        if self._whole:
            self._whole.params = params

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        batch: int,
        stops: Callable[[int, list[int]], int | None] | None = None,
    ) -> Iterator[Piece]:
        """Continue every prompt (from 1 id up to the context length), `batch` of them at a time; yields new ids as they
        come. `stops` is told the number of a prompt and its new ids, and returns after how many of these it stops."""
        bits = jax.tree.map(np.asarray, prompt_bits(prompts, self._sampling.seed))
        rows = -(-min(batch, len(prompts)) // self._row_shards) * self._row_shards
        # A prompt's last new token may be the first one outside the context.
        limits = [min(max_tokens, self._config.sequence_length - len(prompt) + 1) for prompt in prompts]
        for start in range(0, len(prompts), batch):
            some = slice(start, min(start + batch, len(prompts)))
            running = set(range(some.start, some.stop))
            for new in (self._verified if self._whole else self._drafts)(prompts[some], limits[some], bits[some], rows):
                for index, (ids, stopped_by, logprobs) in ((start + row, of_row) for row, of_row in new.items()):
                    if index not in running:
                        continue
                    if stops and (stop := stops(index, ids)) is not None:
                        ids, stopped_by = ids[:stop], "stop"
                    elif stopped_by == "length" and limits[index] < max_tokens:
                        stopped_by = "context"
                    if stopped_by:
                        running.remove(index)
                    yield Piece(index, ids, stopped_by, logprobs[: len(ids)])
                if not running:
                    break

    def _drafts(
        self, prompts: Sequence[Sequence[int]], limits: list[int], bits: RandomBits, rows: int
    ) -> Iterator[_New]:
        """New ids of a batch of prompts, as the cache gives them, dispatch by dispatch."""
        missing = dict(enumerate(limits))  # of rows that run
        for tokens_BN in self._dispatches(self._inputs(prompts, limits, bits, rows), max(limits)):
            new: _New = {}
            for row in list(missing):
                ids = [token for token in tokens_BN[row].tolist() if token != IGNORED]
                missing[row] -= len(ids)
                ended = len(ids) < tokens_BN.shape[1]
                new[row] = ids, "length" if missing[row] == 0 else "end" if ended else None, []
                if new[row][1]:
                    del missing[row]
            yield new
            if not missing:
                return

    def _verified(
        self, prompts: Sequence[Sequence[int]], limits: list[int], bits: RandomBits, rows: int
    ) -> Iterator[_New]:
        """Whole continuations of a batch of prompts. With `--bitwise` they are what whole texts choose: those of the
        cache, up to the first id that whole texts choose otherwise, which it continues from."""
        assert self._whole
        ids, done = [list[int]() for _ in prompts], dict[int, Stop]()
        while left := [row for row in range(len(prompts)) if row not in done]:
            begun = [[*prompts[row], *ids[row]] for row in left]
            room, own_bits = [limits[row] - len(ids[row]) for row in left], bits[np.array(left)]
            drafts = [list[int]() for _ in left]
            for new in self._drafts(begun, room, own_bits, rows):
                for place, (more, stopped_by, _) in new.items():
                    drafts[place] += more
                    if stopped_by:
                        done[left[place]] = stopped_by
            if not self._bitwise:
                ids = drafts
                continue
            chosen = self._whole.choices(begun, drafts, room, own_bits)
            for row, draft, tokens, most in zip(left, drafts, chosen, room, strict=True):
                done.pop(row)
                for place, token in enumerate(tokens):
                    if token in self._ends:
                        done[row] = "end"
                        break
                    ids[row].append(token)
                    if place + 1 == most:
                        done[row] = "length"
                    if draft[place : place + 1] != [token]:
                        break
        logprobs = self._whole.logprobs(prompts, ids) if self._logprobs else [[]] * len(prompts)
        yield {row: (ids[row], done[row], logprobs[row]) for row in range(len(prompts))}

    def _inputs(self, prompts: Sequence[Sequence[int]], limits: list[int], bits: RandomBits, rows: int) -> State:
        """A batch's prompts as sharded arrays; rows without a prompt are stopped from the start."""
        power = 1 << (max(map(len, prompts)) - 1).bit_length()
        tokens = np.zeros((rows, min(max(power, SHORTEST), self._config.sequence_length)), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        free = rows - len(prompts)
        length = np.array([*map(len, prompts), *[1] * free], np.int32)
        limit = np.array([*limits, *[0] * free], np.int32)
        padded_bits = jax.tree.map(lambda word: np.pad(word, (0, free)), bits)

        def put(array: np.ndarray) -> Array:
            return jax.make_array_from_callback(array.shape, shardings(self._mesh, ROWS), lambda index: array[index])

        return jax.tree.map(put, {"tokens": tokens, "length": length, "limit": limit, "bits": padded_bits})

    def _dispatches(self, inputs: State, most: int) -> Iterator[np.ndarray]:
        """The tokens of every dispatch [B, N], `IGNORED` where a row has stopped; the next one is already running."""
        free = -(-(most - 1) // TOKENS_AT_ONCE) * TOKENS_AT_ONCE
        if self._bitwise:  # few lengths are compiled, whatever is left after the first draft
            free = 1 << (free - 1).bit_length() if free else 0
        num_slots = inputs["tokens"].shape[1] + free
        prefill, specs = partial(self._on_devices.prefill, num_slots), self._on_devices.state_specs
        state, tokens_BN = self._run(("prefill", num_slots), prefill, inputs, ROWS)
        for _ in range(1, most, TOKENS_AT_ONCE):
            decode = self._on_devices.decode
            state, following_BN = self._run(("decode", num_slots), decode, state, specs, donate_argnums=1)
            yield np.asarray(tokens_BN)
            tokens_BN = following_BN
        yield np.asarray(tokens_BN)

    def _run(self, name: tuple, function: Callable, argument: State, specs: Tree, **jit: Any) -> tuple[State, Array]:
        """Run a function of the weights and a state in the region; compiled once per shape of the state."""
        key = *name, *(leaf.shape for leaf in jax.tree.leaves(argument))
        if key not in self._programs:
            began = time.perf_counter()
            region = self._on_devices.region(function, specs)
            with phase(f"compiling generation, {name[0]}"):
                self._programs[key] = jax.jit(region, **jit).lower(self._weights, argument).compile()
            self._compile_seconds += time.perf_counter() - began
        return self._programs[key](self._weights, argument)
