"""Random batches, for measuring and comparing programs."""

import numpy as np
import numpy.typing as npt

from megajax.batch import IGNORED, pairs_form
from megajax.config import Config
from megajax.data.gpt import document_positions
from megajax.program.program import batch_form

Batch = dict[str, npt.NDArray[np.int32]]


def random_batch(config: Config, step: int) -> Batch:
    """A global batch that depends on the configuration's form, seed and step only."""
    rng = np.random.default_rng((config.seed, step))
    batch = _pairs(config, rng) if "order" in batch_form(config).entries else _text(config, rng)
    assert batch.keys() == batch_form(config).entries.keys(), "not a form that is known here"
    return batch


def _text(config: Config, rng: np.random.Generator) -> Batch:
    """A tenth of the targets is ignored, unevenly over rows. Where attention is reset, a document ends after a seventh
    of the tokens, anywhere."""
    shape = (config.train.global_batch, config.model.sequence_length + 1)
    tokens = rng.integers(0, config.model.vocab_size, shape, np.int32)
    ignored = rng.random((shape[0], shape[1] - 1)) < np.linspace(0.0, 0.2, shape[0])[:, None]
    batch = {"tokens": tokens[:, :-1], "targets": np.where(ignored, np.int32(IGNORED), tokens[:, 1:])}
    if config.data.reset_attention:
        begins = rng.random(ignored.shape) < 1 / 7
        batch["positions"] = np.stack([document_positions(np.flatnonzero(row), len(row)) for row in begins])
    return batch


def _pairs(config: Config, rng: np.random.Generator) -> Batch:
    """Rows of half the sequence and more, a quarter of them of one segment; up to three tenths of the tokens are
    masked, unevenly over rows, as far as a row has places for them."""
    rows, length = config.train.global_batch, config.model.sequence_length
    ids = rng.integers(0, config.model.vocab_size, (rows, length), np.int32)
    length_B = rng.integers(-(-length // 2), length + 1, rows, np.int32)
    first_B = np.where(rng.random(rows) < 1 / 4, length_B, rng.integers(1, length_B + 1, dtype=np.int32))
    place_T = np.arange(length)
    there = place_T < length_B[:, None]
    order = np.where(first_B < length_B, rng.integers(0, 2, rows, np.int32), np.int32(IGNORED))
    batch = pairs_form().padding(rows, tokens=length) | {
        "tokens": np.where(there, ids, np.int32(0)),
        "token_types": (there & (place_T >= first_B[:, None])).astype(np.int32),
        "length": length_B,
        "order": order.astype(np.int32),
    }
    for row, share in enumerate(np.linspace(0.0, 0.3, rows)):
        count = min(int(rng.binomial(length_B[row], share)), batch["places"].shape[1])
        places = np.sort(rng.choice(int(length_B[row]), count, replace=False))
        batch["places"][row, :count], batch["targets"][row, :count] = places, ids[row, places]
        batch["tokens"][row, places] = rng.integers(0, config.model.vocab_size, count, np.int32)
    return batch
