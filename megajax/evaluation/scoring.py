"""The loss of every target in some samples, and perplexity and accuracy over all of them, on any mesh.

Figures agree for all meshes and batch sizes up to the rounding of each token's loss: devices compute the losses of
tokens, and the host sums them in float64. Every process calls these functions and gets the same results.
"""

import math
import operator
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from megajax.core.batch import IGNORED
from megajax.core.program.program import Program
from megajax.core.program.scoring import scores, task_logits
from megajax.data.samples.base import Samples
from megajax.data.samples.gpt import ContinuationSamples
from megajax.data.samples.loader import evaluation_batches

_AHEAD = 1  # batches that the devices compute while the host reads another


@dataclass(frozen=True)
class SampleScores:
    """The counted targets of one loss in one sample, in order."""

    loss: npt.NDArray[np.float64]  # cross-entropy of each target in nats, float64 [targets]
    hit: npt.NDArray[np.bool_]  # whether each target is the most probable id, [targets]

    @classmethod
    def of(cls, loss: npt.NDArray[Any], hit: npt.NDArray[Any]) -> "SampleScores":
        """Keep the counted entries; both arguments are [T], or a number each."""
        counted = hit != IGNORED
        return cls(loss[counted].astype(np.float64).reshape(-1), hit[counted].reshape(-1) == 1)


def score_samples(
    program: Program, params: Any, samples: Samples, *, batches: int = 0, between: Callable[[], None] = lambda: None
) -> Iterator[dict[str, SampleScores]]:
    """Scores of every sample in order, by the name of the loss, without dropout.

    Batches have the program's global batch size; the last one is padded. There are at most `batches`, unless that is 0.
    `between` is called before every batch; an exception from it ends the scoring.
    """
    for row in _rows(program, scores(program), params, samples, between, batches):
        yield {name: SampleScores.of(loss, hit) for name, (loss, hit) in row.items()}


def answer_samples(
    program: Program, params: Any, samples: Samples, *, between: Callable[[], None] = lambda: None
) -> npt.NDArray[np.float32]:
    """The logits that answer a task's samples (`FamilyModel.task_logits`), in order, [samples, …], without dropout; for
    the arguments see `score_samples`."""
    rows = _rows(program, task_logits(program), params, samples, between)
    return np.stack([row.astype(np.float32) for row in rows])


def _rows(
    program: Program, function: Callable, params: Any, samples: Samples, between: Callable[[], None], limit: int = 0
) -> Iterator[Any]:
    """Results of a function of weights and a batch for every sample, in order, in host memory."""
    rows, size = program.local_rows, program.config.train.global_batch
    left, running = len(samples), deque[Any]()

    def read() -> Iterator[Any]:
        nonlocal left
        found = jax.tree.map(np.asarray, running.popleft())
        for row in range(min(size, left)):
            yield jax.tree.map(operator.itemgetter(row), found)
        left -= size

    for batch in evaluation_batches(samples, rows=rows, global_batch=size, limit=limit):
        between()
        running.append(function(params, program.put_batch(batch, rows)))
        if len(running) > _AHEAD:
            yield from read()
    while running:
        yield from read()


@dataclass(frozen=True)
class Continuation:
    """The score of the end of a token sequence."""

    log_probability: float  # of the continuation given the tokens before it, summed over its tokens
    greedy: bool  # whether each of its tokens is the most probable one


def score_continuations(
    program: Program,
    params: Any,
    sequences: Sequence[tuple[Sequence[int], int]],
    *,
    between: Callable[[], None] = lambda: None,
) -> list[Continuation]:
    """Scores of the ends of token sequences, in order. Each is given as its ids and the index (at least 1) of the first
    one to score; for `between` see `score_samples`."""
    samples = ContinuationSamples(sequences, sequence_length=program.config.model.sequence_length)
    if not len(samples):
        return [Continuation(0.0, True) for _ in sequences]
    losses, greedy = np.zeros(len(sequences)), np.ones(len(sequences), bool)
    for owner, found in zip(samples.owners, score_samples(program, params, samples, between=between), strict=True):
        losses[owner] += found["next_token"].loss.sum()
        greedy[owner] &= found["next_token"].hit.all()
    return [Continuation(0.0 - loss, hit) for loss, hit in zip(losses.tolist(), greedy.tolist(), strict=True)]


@dataclass(frozen=True)
class Perplexity:
    """One loss over a set of samples."""

    total_loss: float  # cross-entropy of all targets, in nats
    tokens: int  # number of targets
    hits: int = 0  # number of targets whose most probable id is right

    @property
    def loss(self) -> float:
        """Mean cross-entropy per target, in nats."""
        return self.total_loss / max(self.tokens, 1)

    @property
    def accuracy(self) -> float:
        """Share of targets whose most probable id is right."""
        return self.hits / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite if that overflows."""
        return self.per(self.tokens)

    def per(self, units: int) -> float:
        """Perplexity per word, if the text has `units` words, or per any other unit: exp(total loss / units)."""
        loss = self.total_loss / max(units, 1)
        return math.exp(loss) if loss < 700 else math.inf

    @classmethod
    def of(cls, scores: list[SampleScores]) -> "Perplexity":
        """The sum over some samples."""
        losses = math.fsum(float(sample.loss.sum()) for sample in scores)
        return cls(losses, sum(len(sample.loss) for sample in scores), sum(int(sample.hit.sum()) for sample in scores))


def perplexities(
    program: Program,
    params: Any,
    samples: Samples,
    *,
    batches: int = 0,
    between: Callable[[], None] = lambda: None,
    names: Collection[str] = (),
) -> dict[str, Perplexity]:
    """Losses over `samples`, by default those that the samples have targets for, otherwise of the `names` those that
    there are; for the other arguments see `score_samples`."""
    scores: dict[str, list[SampleScores]] = defaultdict(list)
    for sample in score_samples(program, params, samples, batches=batches, between=between):
        for name, of_loss in sample.items():
            scores[name].append(of_loss)
    return {name: Perplexity.of(scores[name]) for name in names or samples.form.targets if not names or name in scores}


def total_loss(losses: dict[str, Perplexity]) -> float:
    """What training minimizes: the sum of the losses, each averaged over its own targets."""
    return math.fsum(each.loss for each in losses.values())
