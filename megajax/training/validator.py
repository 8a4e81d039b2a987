"""Validation during training, on the held-out part of the corpora and on named sets."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from megajax.core.batch import IGNORED
from megajax.core.program.program import Program
from megajax.data.samples.base import Samples
from megajax.evaluation.during import read_tasks
from megajax.evaluation.finetuned import dev_figures
from megajax.evaluation.scoring import Perplexity, perplexities, total_loss
from megajax.runs.data import RunData
from megajax.runs.task_data import TaskData
from megajax.settings.config import Config
from megajax.training.display import Display
from megajax.training.given import OwnData
from megajax.training.watchdog import COMPILING, COMPUTING, Watchdog


class Validator:
    """Evaluates weights for one start of a run."""

    def __init__(
        self, config: Config, program: Program, data: RunData | TaskData | OwnData, watchdog: Watchdog, display: Display
    ):
        self._config, self._program, self._data = config, program, data
        self._watchdog, self._display = watchdog, display
        self._doing = COMPILING
        self._tasks = read_tasks(config, data.tokenizer)
        self._means: dict[str, float] = {}  # of the newest evaluation's measures, as in metrics.jsonl
        self.last: dict[str, Perplexity] | None = None  # losses by name in the newest validation of the split

    def validate(
        self, step: int, params: Any, between: Callable[[], None]
    ) -> tuple[dict[str, Perplexity], dict[str, float], dict[str, float]]:
        """Evaluate the weights after a step: every loss by name over the validation split, the loss of each named set,
        and what else an own loss says of the split. `between` is called before every batch; if it raises, validation
        ends and `last` does not change."""
        batches = self._config.train.eval_batches
        split = self.evaluate(step, params, batches, between=between)
        means = self._means
        named = {
            name: total_loss(self.evaluate(step, params, batches, samples, between, f"validation of {name}"))
            for name, samples in self._data.validation_sets.items()
        }
        self.last = split
        return split, named, means

    def evaluate(
        self,
        step: int,
        params: Any,
        batches: int,
        samples: Samples | None = None,
        between: Callable[[], None] = lambda: None,
        name: str = "validation",
    ) -> dict[str, Perplexity]:
        """Every loss by name over the first `batches` batches (0: all) of `samples`, by default the held-out split."""
        samples = samples or self._data.validation
        assert samples is not None, "nothing is held out"
        whole = -(-len(samples) // self._config.train.global_batch)
        total, begun = min(whole, batches or whole), itertools.count()
        with self._display.phase(name, total, announced=False) as advance:

            def before_batch() -> None:
                self._watchdog.at(step, self._doing)
                advance(next(begun))
                between()

            form = self._program.form
            names = [*form.targets, *form.measures, "next_token"]
            losses = perplexities(self._program, params, samples, batches=batches, between=before_batch, names=names)
        self._doing = COMPUTING  # the scoring program is compiled from now on
        self._means = {f"validation_{name}": losses[name].loss for name in form.measures if name in losses}
        if "next_token" in losses and len(losses) > 1 and not form.by_row:
            self._means = {"validation_perplexity": losses["next_token"].perplexity} | self._means
        return {name: losses[name] for name in form.targets if name in losses} or losses  # without an own loss's arrays

    def bits_per_byte(self, split: dict[str, Perplexity]) -> float | None:
        """A language model's loss on the `split` (its first tokens were scored), in bits per UTF-8 byte of their text;
        None for another model, or if the tokenizer does not know the bytes."""
        scored, samples, tokenizer = split.get("next_token"), self._data.validation, self._data.tokenizer
        if scored is None or samples is None or tokenizer is None:
            return None
        num_bytes, left = 0, scored.tokens
        for index in range(len(samples)):
            if left <= 0:
                break
            targets = samples[index]["targets"]
            targets = targets[targets != IGNORED]
            size = tokenizer.num_bytes(targets)
            if size is None:
                return None
            num_bytes, left = num_bytes + size, left - len(targets)
        return scored.total_loss / math.log(2) / num_bytes if num_bytes else None

    def score_dev(self, step: int, params: Any, data: TaskData, between: Callable[[], None]) -> dict[str, float]:
        """A task's figures on its dev records; `between` as in `validate`."""
        with self._display.phase(f"scoring dev of {self._config.task.name}", announced=False):
            return dev_figures(self._config, self._program, params, data, self._before_batch(step, between))

    def evaluate_tasks(
        self, step: int, params: Any, between: Callable[[], None]
    ) -> Iterator[tuple[str, dict[str, float]]]:
        """Name and figures of each `--evaluate` task: those with a file, and the run's own task as `dev`, which is
        scored separately after the last step. `between` as in `validate`."""
        train, data = self._config.train, self._data
        if isinstance(data, TaskData) and step < train.steps:
            yield "dev", self.score_dev(step, params, data, between)
        for name, evaluation in self._tasks.items():
            with self._display.phase(f"evaluating {name}", announced=False):
                yield name, evaluation(self._program, params, between=self._before_batch(step, between))

    def _before_batch(self, step: int, between: Callable[[], None]) -> Callable[[], None]:
        doing = itertools.chain([COMPILING], itertools.repeat(COMPUTING))

        def before_batch() -> None:
            self._watchdog.at(step, next(doing))
            between()

        return before_batch
