"""The training loop: the host prepares and reports while the devices compute, and tracks the last good checkpoint."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax.stages import Compiled

from megajax.core.errors import RunError, UserError, WrongDevice
from megajax.core.models.router import LOAD
from megajax.core.program.program import Batch, Program
from megajax.core.program.recheck import RECHECK
from megajax.core.program.state import TrainState
from megajax.core.program.train_step import evaluated_weights, train_step
from megajax.data.samples.loader import growing_batches
from megajax.evaluation.scoring import total_loss
from megajax.host.processes import Poll, is_first_process, of_first_process, say
from megajax.host.signals import Stopped, stop_signals
from megajax.host.transcript import printable
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.data import RunData
from megajax.runs.failures import in_one_line
from megajax.runs.init import first_or_newest_state
from megajax.runs.lock import RunLock
from megajax.runs.order import Order
from megajax.runs.step_folders import Retention
from megajax.runs.task_data import TaskData
from megajax.settings.config import Config
from megajax.start.launch import give_back_freed_memory, runs_at_once
from megajax.training.figures import SkippedSteps, Speed, memory_in_use
from megajax.training.given import NOTHING, OwnData, Supplied
from megajax.training.profiler import StepTrace
from megajax.training.recheck import Rechecks
from megajax.training.reference import add_reference
from megajax.training.run_log import RunLog
from megajax.training.summary import end_lines, parts_of, sample, validation_text, written
from megajax.training.validator import Validator
from megajax.training.watchdog import COMPILING, COMPUTING, WRITING, Watchdog

_PROMISE = "finishing the current step and writing a checkpoint"  # after a signal


@dataclass
class _Pending:
    """A dispatched step whose metrics have not been read yet."""

    step: int
    sequences: int
    tokens: int
    metrics: dict[str, jax.Array]
    dispatched: float
    data_seconds: float
    asked: Callable[[], tuple[int, ...]]  # what the processes requested of each other after it


class _SignalSeen(Exception):
    """A signal asked all processes to stop."""


class Trainer:
    """One start of a run: the state of the loop."""

    def __init__(
        self,
        config: Config,
        program: Program,
        data: RunData | TaskData | OwnData,
        order: Order,
        lock: RunLock,
        supplied: Supplied = NOTHING,
    ):
        self.config, self.program, self.data, self.lock, self.supplied = config, program, data, lock, supplied
        run_dir = Path(config.run_dir)
        saving = config.checkpoint
        keep = Retention(saving.keep, saving.keep_best, saving.keep_every)
        self.checkpoints = Checkpoints(run_dir, program.layout, keep, saving.max_failures)
        self.state = first_or_newest_state(self.checkpoints, config, program, supplied.state)
        self.first = supplied.step if self.checkpoints.saved is None else self.checkpoints.saved
        is_new = self.checkpoints.saved in (None, 0)
        add_reference(data, program, config, self._weights, self.state if is_new else None)
        self.order = order.at(self.first)
        self.skipped = SkippedSteps(config, self.first - int(self.state.step))
        self.rechecks = Rechecks(config, program)
        self.trace = StepTrace(config, self.first)
        train, writes = config.train, is_first_process()
        self.log = RunLog(run_dir, train.steps, self.first, train.log_every, write=writes, track=config.track)
        self.speed = Speed(config)
        self.watchdog = Watchdog(run_dir, config.distributed.patience)
        self.poll = Poll()
        self.pending: _Pending | None = None
        self.stop_signal = 0  # one that all processes know about
        self.minutes_over = False  # `checkpoint.minutes` have passed
        self.step = self.dispatched = self.first  # the current one; the last one whose state is there
        self.last_save = time.monotonic()
        self.ready = time.perf_counter()  # when the newest metrics were read
        self.validator = Validator(config, program, data, self.watchdog, self.log.display)
        self.dev_figures: dict[str, float] = {}  # of a task, at the end
        self.seconds = self.data_seconds = 0.0  # of all steps; spent waiting for batches

    def go(self) -> None:
        try:
            with stop_signals.deferred(_PROMISE):
                self._steps_or_save()
        except (Stopped, RunError, UserError):
            self.trace.close()
            self.checkpoints.close()
            self.log.close()
            raise
        except BaseException as error:  # other processes may be gone, so do nothing that needs them
            self.log.close()
            self.watchdog.explain(error)
            raise
        else:
            self.checkpoints.close()
        finally:
            self.watchdog.close()  # a notebook goes on after an error
        with self.log:
            self.log.end_steps()
            if self.supplied.ending != "whole":
                return
            self._summary()
        for line in written(Path(self.config.run_dir)):
            say(line)

    def _steps_or_save(self) -> None:
        """All steps. If the data, a callback or a tracker raises, save the last computed step, as a signal does; the
        error says where. Several processes save nothing then, since the others wait in the next step."""
        try:
            self._steps()
        except (RunError, Stopped):
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and stop_signals.number:  # a second Ctrl-C
                raise
            unsaved = ""
            if jax.process_count() == 1:
                try:
                    self._save_computed()
                except Exception as another:
                    unsaved = f", whose state could not be saved ({in_one_line(another)})"
            kept = [note for note in getattr(error, "__notes__", ()) if "Grain has removed" not in note]
            error.__notes__ = kept  # Grain tells of its own flag, which no command has
            if self.dispatched:
                done = f"training ended after step {self.dispatched} of {self.config.train.steps}{unsaved}"
                error.add_note(f"{done}; last good checkpoint: {self.checkpoints.last_good}; rerun to resume")
            raise

    def _save_computed(self) -> None:
        """Write the state of the last step that was computed, unless it is there."""
        self._catch_up()
        self.checkpoints.wait()
        if self.dispatched > (self.checkpoints.saved or self.first):
            self._save(self.dispatched)
            self.checkpoints.wait()

    def _steps(self) -> None:
        config = self.config
        self._make_up()
        sizes, program = self.order.sizes, self.program
        rows_of = functools.cache(program.rows_of)
        batches = self.batches(rows_of)
        at_once = runs_at_once(config)
        compiled: dict[bool, Compiled] = {}  # by whether they recheck
        checksums = self.rechecks.checksums(self.first + 1, self.state)
        for step in range(self.first + 1, config.train.steps + 1):
            self.step = step
            self.watchdog.at(step, "loading its batch")
            asked = time.perf_counter()
            loaded = next(batches)
            data_seconds = time.perf_counter() - asked
            size = sizes.at(step - 1).size
            grown, rechecks = size != program.config.train.global_batch, bool(checksums)
            if compiled and (grown or rechecks not in compiled):
                if grown:
                    compiled.clear()
                if self._catch_up() and self._saves(step - 1):  # when stopping, do not compile
                    self._validate_and_save(step - 1)
            if not compiled:
                program = self.program.with_batch(size)
            batch = program.put_batch(loaded, rows_of(size))
            if rechecks not in compiled:
                compiled[rechecks] = self._compile(step, program, batch, *checksums)
            if step == self.trace.first:
                self._catch_up()
                self.trace.start()
            dispatched = time.perf_counter()
            self.watchdog.at(step, COMPUTING)
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                self.state, metrics = compiled[rechecks](self.state, batch, *checksums)
            checksums = self.rechecks.checksums(step + 1, self.state)
            self.dispatched = step
            asked_after = self.poll.ask(self._asks)
            self._catch_up(_Pending(step, size, batch["tokens"].size, metrics, dispatched, data_seconds, asked_after))
            if at_once or step == self.trace.last:
                self._catch_up()
            if step == self.trace.last:
                self._end_trace()
            if config.evaluate and self._due(step, config.evaluate_every):
                self._catch_up()
                self._evaluate(step)
            if self._due(step, config.train.eval_every) or self._saves(step):
                self._catch_up()
                self._validate_and_save(step)
            self.log.show_checkpoints(self.checkpoints)
        with stop_signals.deferred("all steps are done; the run ends once they are saved"):
            self.checkpoints.wait()
            self.log.show_checkpoints(self.checkpoints)
            self._score_dev()

    def _make_up(self) -> None:
        """Validate and evaluate at the step from which a run goes on if that was due there and is not recorded: a
        signal may have ended the start before in the middle of it."""
        step, config = self.first, self.config
        if not step or self.checkpoints.saved is None:
            return
        if self._due(step, config.train.eval_every) and of_first_process("validation_loss" not in self.log.recorded):
            self._check_finite(step, self._validate(step))
        tasks = {entry.partition("=")[0] for entry in config.evaluate} if config.pretrains else {"dev"}
        due = config.evaluate and self._due(step, config.evaluate_every)
        if due and of_first_process(not tasks <= self.log.recorded):
            self._evaluate(step)
        if self.stop_signal:
            self._stop_by_signal(step)

    def batches(self, rows_of: Callable[[int], list[int]]) -> Iterator[Any]:
        """The batches of all steps that are left."""
        if isinstance(self.data, OwnData) and self.data.batches:
            return self.data.batches(self.first)
        samples = self.order.samples(self.data.train)
        return growing_batches(samples, sizes=self.order.sizes, rows_of=rows_of, start_step=self.first)

    def _compile(self, step: int, program: Program, batch: Batch, *checksums: jax.Array) -> Compiled:
        """Compile a program's step, which is rechecked if there are checksums. A signal before the first step of this
        start ends a run with a single process."""
        self.watchdog.at(step, COMPILING)
        began = time.perf_counter()
        ramps = len(self.order.sizes.stages) > 1
        what = "the rechecked step" if checksums else "the step"
        what += f" of {program.config.train.global_batch} sequences" * ramps
        ends = step == self.first + 1 and jax.process_count() == 1
        promise = "there is nothing new to save; the run ends once the step is compiled" if ends else _PROMISE
        with stop_signals.deferred(promise), self.log.display.phase(f"compiling {what}"):
            step_function = train_step(program, recheck=bool(checksums))
            compiled = step_function.lower(self.state, batch, *checksums).compile()
        self.log.display.print(f"compiled {what} in {time.perf_counter() - began:.1f} s")
        give_back_freed_memory()
        if ends and stop_signals.number:
            raise Stopped(stop_signals.number, f" before step {step}: there is nothing new to save")
        self.ready = time.perf_counter()
        return compiled

    def _end_trace(self) -> None:
        with self.log.display.phase("writing the trace", announced=False):
            line = self.trace.finish()
        self.log.display.print(line)
        self.ready = time.perf_counter()

    def _asks(self) -> tuple[int, int]:
        """What this process requests of all: to stop, by its signal, and to write a checkpoint, because it is due."""
        minutes = self.config.checkpoint.minutes
        over = is_first_process() and 0 < 60 * minutes <= time.monotonic() - self.last_save
        return stop_signals.number, int(over)

    def _look_for_a_signal(self) -> None:
        """Called between two validation batches; raises `_SignalSeen` if all processes must stop."""
        self.stop_signal = self.poll.ask(self._asks)()[0]
        if self.stop_signal:
            raise _SignalSeen

    def _saves(self, step: int) -> bool:
        due = self.supplied.ending != "none" and self._due(step, self.config.checkpoint.every)
        return bool(self.stop_signal) or self.minutes_over or due

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.config.train.steps)

    def _catch_up(self, new: _Pending | None = None) -> bool:
        """Wait for the metrics of the pending step and log them, and let a `new` one be pending; returns whether there
        was such a step."""
        pending, self.pending = self.pending, new
        if pending is None:
            return False
        metrics = {name: float(value) for name, value in pending.metrics.items() if value.ndim == 0}
        self.stop_signal, over = pending.asked()
        self.minutes_over = bool(over)
        now = time.perf_counter()
        self.ready, seconds = now, now - max(self.ready, pending.dispatched)
        reason, wrong = self.skipped.count(pending.step, metrics), ""
        if RECHECK in pending.metrics:
            metrics["recheck_differs"], wrong = self.rechecks.judged(pending.step, pending.metrics[RECHECK])
            reason = wrong or reason
        del metrics["skipped"]
        if pending.step == self.first + 1 and (line := memory_in_use(jax.local_devices())):
            self.log.display.print(line)
        self.seconds += seconds
        self.data_seconds += pending.data_seconds * (pending.step > self.first + 1)  # before, nothing computes
        figures = {"loss": metrics["loss"]} | metrics | {"skipped_steps": self.skipped.total}
        tokens_per_second = pending.tokens / max(seconds, 1e-9)
        figures |= {"tokens": pending.tokens, "seconds": seconds, "tokens_per_second": tokens_per_second}
        figures |= self.speed.figures(pending.sequences, seconds) | {"data_seconds": pending.data_seconds}
        self.log.record_step(pending.step, figures, pending.metrics.get(LOAD))
        with self._called():
            self.supplied.on_step(pending.step, figures)
        if wrong and not self.config.train.recheck_continue:
            self._stop(self.rechecks.narrowed(wrong), WrongDevice)
        if self.skipped.too_many:
            self._stop(reason)
        if reason:
            self.log.display.print(f"{reason}: skipped")
        return True

    def _stop(self, reason: str, kind: type[RunError] = RunError) -> NoReturn:
        with contextlib.suppress(RunError):  # if a write failed too, the reason comes first
            self.checkpoints.wait()
        raise kind(f"{reason}, so training stops; last good checkpoint: {self.checkpoints.last_good}")

    def _validate_and_save(self, step: int) -> None:
        loss = self._validate(step) if self._due(step, self.config.train.eval_every) else None
        waits = not self.stop_signal or self.validator.last is not None  # when stopping, don't wait for a compiler
        if loss is None and waits and self.config.train.eval_every:  # check the new weights, not evaluated yet
            loss = total_loss(self.validator.evaluate(step, self._weights(), 1))
        self._check_finite(step, loss)
        if self._saves(step):
            self._save(step)
        if self.stop_signal:
            self._stop_by_signal(step)
        self.ready = time.perf_counter()

    def _check_finite(self, step: int, loss: float | None) -> None:
        if loss is not None and not math.isfinite(loss):
            self._stop(f"step {step}: the validation loss after it is {loss}")

    def _save(self, step: int) -> None:
        self.watchdog.at(step, WRITING)
        self.lock.check()
        self.checkpoints.save(step, self.state)
        self.last_save, self.minutes_over = time.monotonic(), False

    def _weights(self, state: TrainState | None = None) -> Any:
        """The weights of a state, by default the current one, to evaluate: their average, if there is one."""
        return evaluated_weights(self.program, state or self.state)

    def _stop_by_signal(self, step: int) -> NoReturn:
        self.checkpoints.wait()
        for problem in self.checkpoints.news():
            self.log.display.print(problem)
        last = f"last good checkpoint: {self.checkpoints.last_good}; rerun the command to resume"
        raise Stopped(self.stop_signal, f" after step {step} of {self.config.train.steps}; {last}")

    def _validate(self, step: int) -> float | None:
        """Log and return the validation loss after a step; None if a signal came meanwhile."""
        try:
            parts, named, means = self.validator.validate(step, self._weights(), self._look_for_a_signal)
        except _SignalSeen:
            return None
        loss = total_loss(parts)
        self.checkpoints.losses[step] = loss
        self.log.record_validation(step, loss, named, parts_of(parts, self.program.form) | means)
        self.log.record_text(step, "validation", validation_text(self.config, parts))
        with self._called():
            self.supplied.on_validation(step, loss)
        return loss

    @contextlib.contextmanager
    def _called(self) -> Iterator[None]:
        """Around a callback: after one has raised, none is called."""
        try:
            yield
        except BaseException:
            self.supplied = NOTHING
            raise

    def _evaluate(self, step: int) -> None:
        """Compute and record the evaluations of `--evaluate`, unless a signal comes meanwhile."""
        with contextlib.suppress(_SignalSeen):
            for name, figures in self.validator.evaluate_tasks(step, self._weights(), self._look_for_a_signal):
                self.log.record_task(step, name, figures)
        self.ready = time.perf_counter()

    def _score_dev(self) -> None:
        """Compute and record a task's figures on its dev records; if a signal comes meanwhile, the next start does."""
        try:
            if isinstance(self.data, TaskData) and self.supplied.ending == "whole":
                score = self.validator.score_dev
                self.dev_figures = score(self.step, self._weights(), self.data, self._look_for_a_signal)
                self.log.record_dev(self.step, self.dev_figures)
            self._look_for_a_signal()
        except _SignalSeen:
            self._stop_by_signal(self.step)

    def _summary(self) -> None:
        steps, train = self.config.train.steps, self.config.train
        validation = self.validator.last or {}
        if train.eval_every and not validation:
            validation = self.validator.evaluate(steps, self._weights(), train.eval_batches)
        waited = self.data_seconds / self.seconds if self.seconds else None
        bits = self.validator.bits_per_byte(validation)
        why = "no validation data" if self.data.validation is None else "--train.eval-every 0"
        for line in end_lines(self.config, self.first, validation or why, bits, self.dev_figures, waited):
            say(line)
        with self.log.display.phase("sampling", announced=False):
            text = printable(sample(self.config, self.program, self._weights(), self.data.tokenizer))
        if text:
            say(f"a sample:\n{text}")
            self.log.record_text(max(self.first, steps), "sample", text)
