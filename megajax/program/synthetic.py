"""Random batches, for measuring and comparing programs."""

import numpy as np

from megajax.config import Config
from megajax.data.gpt import IGNORED, document_positions


def random_batch(config: Config, step: int) -> dict[str, np.ndarray]:
    """A global batch that depends on the seed and the step only; a tenth of its targets is ignored, unevenly over
    rows. Where attention is reset, a document ends after a seventh of the tokens, anywhere."""
    rng = np.random.default_rng((config.seed, step))
    shape = (config.train.global_batch, config.model.sequence_length + 1)
    tokens = rng.integers(0, config.model.vocab_size, shape, np.int32)
    ignored = rng.random((shape[0], shape[1] - 1)) < np.linspace(0.0, 0.2, shape[0])[:, None]
    batch = {"tokens": tokens[:, :-1], "targets": np.where(ignored, np.int32(IGNORED), tokens[:, 1:])}
    if config.data.reset_attention:
        begins = rng.random(ignored.shape) < 1 / 7
        batch["positions"] = np.stack([document_positions(np.flatnonzero(row), len(row)) for row in begins])
    return batch
