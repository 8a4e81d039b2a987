"""The sample at the end of training, on any mesh: every new token runs the whole window forward, with the training
program, pipe included. There is no length limit: when the window is full, the oldest tokens leave it."""

import dataclasses
from collections.abc import Collection, Iterator

import jax
import numpy as np

from megajax.core.batch import text_form
from megajax.core.program.program import Program
from megajax.core.program.scoring import next_logits
from megajax.generation.choice import Sampling, choose, prompt_bits
from megajax.host.processes import gathered

_choose = jax.jit(choose, static_argnames="sampling")


def one_row(program: Program) -> Program:
    """The program with the smallest batch, for `continue_in_windows`."""
    train = dataclasses.replace(program.config.train, global_batch=program.config.mesh.row_shards, microbatch=1)
    config = dataclasses.replace(program.config, train=train)
    return Program(config, program.mesh, operand_dtype=program.operand_dtype)


def continue_in_windows(
    program: Program,
    params,
    prompt: list[int],
    *,
    num_tokens: int,
    sampling: Sampling,
    ends: Collection[int] = (),
) -> Iterator[int]:
    """Continue `prompt` (token ids, at least one) by up to `num_tokens` ids; stops before any of the ids in `ends`.

    All processes iterate together and get the same ids. The program's global batch is filled with copies of the prompt.
    """
    model = program.config.model
    ids, bits = [*prompt], prompt_bits([prompt], sampling.seed)
    rows = program.local_rows
    for _ in range(num_tokens):
        window = ids[-model.sequence_length :]
        arrays = text_form().padding(len(rows), tokens=model.sequence_length)
        arrays["tokens"][:, : len(window)] = window
        batch = program.put_batch(arrays, rows)
        logits = next_logits(program)(params, batch, np.int32(len(window) - 1))
        first = gathered(logits)[:1, : model.vocab_size]
        seen = _seen(ids, model.vocab_size) if sampling.penalizes else None
        chosen = int(_choose(first, bits, np.array([len(ids)], np.int32), sampling, seen)[0])
        if chosen in ends:
            break
        ids.append(chosen)
        yield chosen


def _seen(ids: list[int], size: int) -> np.ndarray:
    seen = np.zeros((1, size), bool)
    seen[0, ids] = True
    return seen
