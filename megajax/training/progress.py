"""The progress of a run as it is shown: a bar on a terminal, plain lines anywhere else."""

import math
import statistics
import sys
from collections import deque
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_RECENT = 20  # steps whose median time gives the speed; a median leaves out the step that compiled


class TrainingProgress:
    """A bar or lines about finished steps.

    Args:
        total: steps of the run.
        finished: steps that an earlier attempt has taken.
        log_every: without a bar, each such step is printed, and the last one.
        shown: False: nothing is printed.
        console: where to print; standard output if None.
    """

    def __init__(self, total: int, finished: int, log_every: int, shown: bool = True, console: Console | None = None):
        self._total, self._finished, self._log_every, self._shown = total, finished, log_every, shown
        self._console = console or Console(force_terminal=sys.stdout.isatty())
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._bar: Progress | None = None
        if shown and self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("compiling", total=total, completed=finished)
            self._bar.start()

    def show_step(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        """Show a finished step.

        Args:
            step: its number, from 1.
            loss: nats per token.
            tokens: of the step, on all devices.
            seconds: that it took.
        """
        self._seconds.append(seconds)
        typical = statistics.median(self._seconds)
        left = time_text(typical * (self._total - step))
        text = f"loss {loss:.4f}  {tokens / max(typical, 1e-9):,.0f} tokens/s  {left} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif step % self._log_every == 0 or step == self._total:
            self.print(f"{self._count(step)}  {text}")

    def show_validation(self, step: int, loss: float, name: str = "", parts: Mapping[str, float] | None = None) -> None:
        """Show the validation loss after `step` steps, in nats per token; `name` is that of a named set. Where the loss
        has `parts`, they take the place of its perplexity."""
        of = f" of {name}" if name else ""
        figures = [f"{part.removeprefix('validation_')} {value:.4f}" for part, value in (parts or {}).items()]
        more = "  ".join(figures) or f"perplexity {math.exp(min(loss, 700.0)):.2f}"
        self.print(f"{self._count(step)}  validation loss{of} {loss:.4f}  {more}")

    def print(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        if not self._shown:
            return
        if self._bar is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._console.file, flush=True)

    def _count(self, step: int) -> str:
        return f"step {step:>{len(str(self._total))}}/{self._total}"

    def close(self) -> None:
        """Stop the bar, which stays as it is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def time_text(seconds: float) -> str:
    """A duration as `m:ss`, `h:mm:ss` or `3d 04:05:06`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
