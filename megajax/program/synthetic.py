"""Random batches, for measuring and comparing programs."""

import numpy as np
import numpy.typing as npt

from megajax.batch import IGNORED
from megajax.config import Config
from megajax.data.gpt import document_positions
from megajax.program.program import batch_form


def random_batch(config: Config, step: int) -> dict[str, npt.NDArray[np.int32]]:
    """A global batch of text that depends on the seed and the step only; a tenth of its targets is ignored, unevenly
    over rows. Where attention is reset, a document ends after a seventh of the tokens, anywhere."""
    form = batch_form(config)
    rng = np.random.default_rng((config.seed, step))
    shape = (config.train.global_batch, config.model.sequence_length + 1)
    tokens = rng.integers(0, config.model.vocab_size, shape, np.int32)
    ignored = rng.random((shape[0], shape[1] - 1)) < np.linspace(0.0, 0.2, shape[0])[:, None]
    batch = {"tokens": tokens[:, :-1], "targets": np.where(ignored, np.int32(IGNORED), tokens[:, 1:])}
    if "positions" in form.entries:
        begins = rng.random(ignored.shape) < 1 / 7
        batch["positions"] = np.stack([document_positions(np.flatnonzero(row), len(row)) for row in begins])
    assert batch.keys() == form.entries.keys(), "not a batch of text"
    return batch
