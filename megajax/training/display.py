"""What users see during a run: rows with bars and clocks on a terminal, plain lines elsewhere."""

import contextlib
import math
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from megajax.host.transcript import printable, transcript
from megajax.training.figures import in_words

_EVERY = 60.0  # seconds between two plain lines about the same phase
_BAR, _SHORT_BAR = 15, 6  # columns; the short one on terminals below _WIDE
_WIDE = 100
_RECENT = 20  # steps whose median time per token gives the speed; a median leaves out the step that compiled


class _Clock(ProgressColumn):
    """The time since a phase began."""

    def render(self, task: Task) -> Text:
        return Text(time_text(task.elapsed or 0) if task.fields["clock"] else "")


class _Fitting:
    """As many of these texts as fit in a row, none of them cut."""

    def __init__(self, texts: Sequence[str]):
        self._texts = texts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = len(self._texts)
        while count > 1 and len("  ".join(self._texts[:count])) > options.max_width:
            count -= 1
        yield Text("  ".join(self._texts[:count]), no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, max(1, min(len("  ".join(self._texts)), options.max_width)))


class _Figures(ProgressColumn):
    """What a row says about its step, most important first."""

    def render(self, task: Task) -> _Fitting:  # rich renders it like a text
        return _Fitting(task.fields.get("figures", ()))


class Display:
    """Shows phases. Prints to `console`, by default standard output, and nothing unless `shown`."""

    def __init__(self, shown: bool = True, console: Console | None = None):
        self._shown = shown
        self._console = console or Console(force_terminal=sys.stdout.isatty())
        self._live = shown and self._console.is_terminal and not self._console.is_dumb_terminal
        self._rows: Progress | None = None  # with that of the steps

    @contextlib.contextmanager
    def phase(self, name: str, total: int = 0, *, announced: bool = True) -> Iterator[Callable[[int], None]]:
        """A block for one phase, such as "compiling the step", in `total` parts if their number is known; it gets a
        function to call with the number of finished ones. Without bars, a line marks the beginning of an `announced`
        phase."""
        began, name = time.monotonic(), printable(name)
        if self._live:
            if announced:
                transcript.add(name)
            with contextlib.ExitStack() as stack:
                rows = self._rows or stack.enter_context(self._new_rows(transient=True))
                row = rows.add_task("", total=total or None, head=name, clock=True)
                stack.callback(rows.remove_task, row)
                yield lambda done: rows.update(row, completed=done)
            return
        parts = deque([0], maxlen=1)

        def tell() -> None:
            while not ended.wait(_EVERY):
                of = f", {parts[-1]} of {total}" if total else ""
                self.print(f"{name}: {time_text(time.monotonic() - began)}{of}")

        ended = threading.Event()
        if self._shown:
            if announced:
                self.print(name)
            threading.Thread(target=tell, daemon=True).start()
        try:
            yield parts.append
        finally:
            ended.set()

    def print(self, text: str) -> None:
        """Print a line, above the rows if there are any, and keep it."""
        if not self._shown:
            return
        text = printable(text)
        transcript.add(text)
        if self._live:
            self._console.print(text, markup=False, highlight=False)  # wraps at words
        else:
            print(text, file=self._console.file, flush=True)

    def _new_rows(self, *, transient: bool) -> Progress:
        figures = _Figures(table_column=Column(ratio=1, no_wrap=True))  # gets the remaining width
        bar = BarColumn(_BAR if self._console.width >= _WIDE else _SHORT_BAR)
        columns = TextColumn("{task.fields[head]}", markup=False), bar, _Clock(), figures
        return Progress(*columns, console=self._console, transient=transient, expand=True)


def time_text(seconds: float) -> str:
    """A duration as `m:ss`, `h:mm:ss` or `3d 04:05:06`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


class StepsDisplay(Display):
    """Also shows a bar of finished steps above the phases; without bars, prints every `log_every`-th step and the
    last."""

    def __init__(self, total: int, finished: int, log_every: int, shown: bool = True, console: Console | None = None):
        super().__init__(shown, console)
        self._total, self._log_every = total, log_every
        self._seconds: deque[float] = deque(maxlen=_RECENT)  # per token: steps of a growing batch differ
        self._steps = TaskID(0)
        if self._live:
            self._rows = self._new_rows(transient=False)
            text = f"step {finished}/{total}"
            self._steps = self._rows.add_task("", total=total, completed=finished, head=text, clock=False)
            self._rows.start()

    def close_steps(self) -> None:
        """End the row of the steps; it stays on the screen."""
        if self._rows is not None:
            self._rows.stop()
            self._rows = None

    def show_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Show a finished step, counted from 1, and its figures as metrics.jsonl names them."""
        self._seconds.append(figures["seconds"] / figures["tokens"])
        typical = max(figures["tokens"] * statistics.median(self._seconds), 1e-9)
        texts = _texts(figures, typical, typical * (self._total - step))
        text = "  ".join(texts)
        has_line = self._shown and (step % self._log_every == 0 or step == self._total)
        if self._rows is not None:
            self._rows.update(self._steps, completed=step, head=f"step {step}/{self._total}", figures=texts)
            if has_line:
                transcript.add(self._line(step, text))
        elif has_line:
            self.print(self._line(step, text))

    def show_validation(
        self, step: int, loss: float, name: str = "", details: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Show a validation loss, in nats per token, of the split or a named set; `details` replace its perplexity."""
        suffix = f" of {name}" if name else ""
        figures = [in_words(figure.removeprefix("validation_"), value) for figure, value in details.items()]
        more = "  ".join(figures) or f"perplexity {math.exp(min(loss, 700.0)):.2f}"
        self.print_step(step, f"validation loss{suffix} {loss:.4f}  {more}")

    def print_step(self, step: int, text: str) -> None:
        """Print a line about a step."""
        self.print(self._line(step, text))

    def _line(self, step: int, text: str) -> str:
        return f"step {step:>{len(str(self._total))}}/{self._total}  {text}"


def _texts(figures: Mapping[str, float], seconds: float, left: float) -> list[str]:
    """The figures of a step in words, most important first; speeds are for steps that take so many `seconds`."""
    texts = [
        f"loss {figures['loss']:.4f}",
        f"{figures['tokens'] / seconds:,.0f} tokens/s",
        f"{time_text(left)} left",
    ]
    for name, unit, digits in (("tflops_per_device", " TFLOP/s per device", ".4g"), ("mfu", " MFU", ".1%")):
        if name in figures:
            texts.append(f"{figures[name] * figures['seconds'] / seconds:{digits}}{unit}")
    if "learning_rate" in figures:
        texts.append(f"learning rate {figures['learning_rate']:.3g}")
    texts.append(f"gradient norm {figures['grad_norm']:.3g}")
    if "experts/largest_load" in figures:
        texts.append(f"largest expert load {figures['experts/largest_load']:.2f} x the mean")
    if "memory_bytes" in figures:
        texts.append(f"{figures['memory_bytes'] / 2**30:.1f} GiB in use")
    return texts
