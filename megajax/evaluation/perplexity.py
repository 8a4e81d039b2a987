"""Loss per token and perplexity over a set of samples, on any mesh."""

import math
from dataclasses import dataclass
from typing import Any

from megajax.data.gpt import EvaluationSamples
from megajax.data.loader import evaluation_batches
from megajax.training.step import Program


@dataclass(frozen=True)
class Perplexity:
    """Attributes: loss: mean cross-entropy per predicted token, in nats; tokens: how many were predicted."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def perplexity(program: Program, params: Any, samples: EvaluationSamples, *, batches: int = 0) -> Perplexity:
    """Evaluate `params` on `samples`, dropout off.

    Args:
        program: its global batch is the size of the batches.
        params: weights on the program's mesh.
        samples: what to predict.
        batches: at most this many batches; 0: all.
    """
    rows = program.local_rows
    loss, tokens = 0.0, 0
    results = []
    size = program.config.train.global_batch
    for batch in evaluation_batches(samples, rows=rows, global_batch=size, limit=batches):
        results.append(program.evaluate(params, program.put_batch(batch, rows)))
        if len(results) > 1:  # the device computes one batch ahead of what is read
            loss, tokens = _add(loss, tokens, results.pop(0))
    for result in results:
        loss, tokens = _add(loss, tokens, result)
    return Perplexity(loss / max(tokens, 1), tokens)


def _add(loss: float, tokens: int, result) -> tuple[float, int]:
    return loss + float(result[0]), tokens + int(result[1])
