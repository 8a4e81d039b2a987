"""Loss per token and perplexity over a set of samples, on any mesh."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megajax.data.samples import Samples
from megajax.evaluation.scoring import score_samples
from megajax.program.program import Program


@dataclass(frozen=True)
class Perplexity:
    """The loss of a set of samples.

    Attributes:
        total_loss: cross-entropy of all predicted tokens, in nats.
        tokens: how many were predicted.
    """

    total_loss: float
    tokens: int

    @property
    def loss(self) -> float:
        """Mean cross-entropy per predicted token, in nats."""
        return self.total_loss / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return self.per(self.tokens)

    def per(self, units: int) -> float:
        """Perplexity per word, if the text has `units` words, or per anything else: exp(total loss / units)."""
        return exponential(self.total_loss / max(units, 1))


def exponential(loss: float) -> float:
    """exp(loss); infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def perplexity(
    program: Program,
    params: Any,
    samples: Samples,
    *,
    batches: int = 0,
    between: Callable[[], None] = lambda: None,
) -> Perplexity:
    """Evaluate `params` on `samples`; the arguments are those of `score_samples`."""
    losses = [scores.loss for scores in score_samples(program, params, samples, batches=batches, between=between)]
    return Perplexity(math.fsum(float(loss.sum()) for loss in losses), sum(map(len, losses)))
