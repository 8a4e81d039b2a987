"""The progress of a run on the screen: a row with a bar on a terminal, plain lines elsewhere."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

from megajax.training.display import Display, time_text

_RECENT = 20  # steps whose median time per token gives the speed; a median leaves out the step that compiled


class TrainingProgress:
    """A bar, or lines, about finished steps of `total`; without a bar every `log_every`-th step is printed, and the
    last one."""

    def __init__(self, total: int, finished: int, log_every: int, display: Display):
        self._total, self._log_every, self._display = total, log_every, display
        self._seconds: deque[float] = deque(maxlen=_RECENT)  # per token: steps of a growing batch differ
        display.open_steps(total, finished)

    def show_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Show a finished step, counted from 1, and its figures as metrics.jsonl names them."""
        self._seconds.append(figures["seconds"] / figures["tokens"])
        typical = max(figures["tokens"] * statistics.median(self._seconds), 1e-9)
        text = "  ".join(_texts(figures, typical, typical * (self._total - step)))
        has_row = self._display.show_steps(step, self._total, text)
        if not has_row and (step % self._log_every == 0 or step == self._total):
            self._display.print(f"{self._count(step)}  {text}")

    def show_validation(
        self, step: int, loss: float, name: str = "", details: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Show a validation loss after `step` steps, in nats per token; `name` is that of a named set, `details`
        replace its perplexity."""
        of = f" of {name}" if name else ""
        figures = [f"{figure.removeprefix('validation_')} {value:.4f}" for figure, value in details.items()]
        more = "  ".join(figures) or f"perplexity {math.exp(min(loss, 700.0)):.2f}"
        self._display.print(f"{self._count(step)}  validation loss{of} {loss:.4f}  {more}")

    def show_checkpoint(self, step: int, where: str) -> None:
        """Show that the checkpoint of a step is complete."""
        self._display.print(f"{self._count(step)}  checkpoint in {where}")

    def _count(self, step: int) -> str:
        return f"step {step:>{len(str(self._total))}}/{self._total}"


def _texts(figures: Mapping[str, float], seconds: float, left: float) -> list[str]:
    """The figures of a step in words, most important first; speeds are for steps that take so many `seconds`."""
    texts = [
        f"loss {figures['loss']:.4f}",
        f"{figures['tokens'] / seconds:,.0f} tokens/s",
        f"{time_text(left)} left",
    ]
    for name, unit, digits in (("tflops_per_device", " TFLOP/s a device", ".4g"), ("mfu", " MFU", ".1%")):
        if name in figures:
            texts.append(f"{figures[name] * figures['seconds'] / seconds:{digits}}{unit}")
    texts += [f"learning rate {figures['learning_rate']:.3g}", f"gradient norm {figures['grad_norm']:.3g}"]
    if "memory_bytes" in figures:
        texts.append(f"{figures['memory_bytes'] / 2**30:.1f} GiB in use")
    return texts
