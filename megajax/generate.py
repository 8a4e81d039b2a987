"""Sampling text from a model on any mesh: the whole window is run forward for every new token."""

import numpy as np

from megajax.parallel.vocabulary import IGNORED
from megajax.training.step import Program


def sample(
    program: Program,
    params,
    prompt: list[int],
    *,
    num_tokens: int,
    temperature: float,
    seed: int,
    end: int | None = None,
) -> list[int]:
    """Continue `prompt` (token ids, at least one) by up to `num_tokens` ids; stops before the id `end`.

    All processes call this together and get the same ids. Where the window is full, the oldest tokens leave it.

    Args:
        program: a program whose global batch all rows of the prompt are copied to.
        params: weights on the program's mesh.
        temperature: 0 takes the most probable token; higher is more random.
        seed: of the random choice.
    """
    from jax.experimental import multihost_utils

    length = program.config.model.sequence_length
    rng = np.random.default_rng(seed)
    ids = list(prompt)
    rows = program.local_rows
    for _ in range(num_tokens):
        window = ids[-length:]
        tokens = np.zeros((len(rows), length), np.int32)
        tokens[:, : len(window)] = window
        batch = program.put_batch({"tokens": tokens, "targets": np.full_like(tokens, IGNORED)}, rows)
        logits = program.next_logits(params, batch, np.int32(len(window) - 1))
        first = np.asarray(multihost_utils.process_allgather(logits, tiled=True))[0, : program.config.model.vocab_size]
        chosen = _choose(first.astype(np.float64), temperature, rng)
        if chosen == end:
            break
        ids.append(chosen)
    return ids[len(prompt) :]


def _choose(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    if temperature == 0:
        return int(np.argmax(logits))
    return int(np.argmax(logits / temperature + rng.gumbel(size=logits.shape)))
