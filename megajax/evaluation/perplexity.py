"""Loss per target, perplexity and accuracy over a set of samples, on any mesh."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megajax.data.samples import Samples
from megajax.evaluation.scoring import SampleScores, score_samples
from megajax.program.program import Program


@dataclass(frozen=True)
class Perplexity:
    """One loss over a set of samples."""

    total_loss: float  # cross-entropy of all targets, in nats
    tokens: int  # how many targets there were
    hits: int = 0  # of how many the most probable id was right

    @property
    def loss(self) -> float:
        """Mean cross-entropy per target, in nats."""
        return self.total_loss / max(self.tokens, 1)

    @property
    def accuracy(self) -> float:
        """Share of the targets whose most probable id was right."""
        return self.hits / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return self.per(self.tokens)

    def per(self, units: int) -> float:
        """Perplexity per word, if the text has `units` words, or per anything else: exp(total loss / units)."""
        return exponential(self.total_loss / max(units, 1))

    @classmethod
    def of(cls, scores: list[SampleScores]) -> "Perplexity":
        """Of some samples."""
        losses = math.fsum(float(sample.loss.sum()) for sample in scores)
        return cls(losses, sum(len(sample.loss) for sample in scores), sum(int(sample.hit.sum()) for sample in scores))


def exponential(loss: float) -> float:
    """exp(loss); infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def perplexities(
    program: Program, params: Any, samples: Samples, *, batches: int = 0, between: Callable[[], None] = lambda: None
) -> dict[str, Perplexity]:
    """Every loss of the model by name, on `samples`; the arguments are those of `score_samples`."""
    found: dict[str, list[SampleScores]] = defaultdict(list)
    for scores in score_samples(program, params, samples, batches=batches, between=between):
        for name, of_loss in scores.items():
            found[name].append(of_loss)
    return {name: Perplexity.of(found[name]) for name in samples.form.targets}


def perplexity(program: Program, params: Any, samples: Samples) -> Perplexity:
    """The one loss of a language model."""
    (only,) = perplexities(program, params, samples).values()
    return only


def total_loss(losses: dict[str, Perplexity]) -> float:
    """What training minimises: the sum of the losses, each the mean over its own targets."""
    return math.fsum(each.loss for each in losses.values())
