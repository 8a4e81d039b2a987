"""The training loop: the host prepares and reports while the devices compute, and always knows the last good
checkpoint."""

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import jax

from megajax.config import Config, DistributedConfig, to_toml
from megajax.data.files import write_atomically
from megajax.data.gpt import Samples
from megajax.data.loader import train_batches
from megajax.errors import RunError, UserError
from megajax.evaluation.perplexity import Perplexity, perplexity
from megajax.generation.choice import Sampling
from megajax.generation.text import continuation_text
from megajax.generation.window import continue_in_windows
from megajax.launch import give_back_freed_memory, start
from megajax.processes import is_first_process, on_first_process
from megajax.program.program import Program
from megajax.program.state import TrainState
from megajax.program.train_step import train_step
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.data import RunData, make_run_data, open_run_data
from megajax.runs.directory import claimed
from megajax.training.describe import describe
from megajax.training.run_log import RunLog
from megajax.validation import validate


def train(config: Config) -> None:
    """Train as `config` says, from the beginning or from the newest checkpoint of its run directory.

    Raises:
        UserError: the configuration, the corpus or the run directory cannot be used.
        RunError: too many steps in a row had to be skipped, or no checkpoint can be read.
    """
    if not config.data.path and not config.data.sources:
        raise UserError(
            "--data.path missing; valid: a text, JSONL or Parquet file, a folder, a prepared prefix, or python-stdlib; "
            "or --data.sources"
        )
    start(config)
    validate(config, jax.device_count())
    run_dir = Path(config.run_dir)

    def begin() -> None:
        with claimed(run_dir, config):
            make_run_data(config, run_dir / "data")

    on_first_process(begin)
    data = open_run_data(config, run_dir / "data")
    program = Program.on(config)
    _say(describe(program, data))
    run = _Run(config, run_dir, program, data)
    if run.first < config.train.steps:
        # What belongs to this start, not to the run, is left out, so that the file can be used as a preset.
        lasting = dataclasses.replace(config, distributed=DistributedConfig(), resume="auto")
        on_first_process(lambda: write_atomically(run_dir / "config.toml", to_toml(lasting)))
    run.go()


@dataclass
class _Pending:
    """A step that is dispatched and whose metrics were not read yet."""

    step: int
    metrics: dict[str, jax.Array]
    dispatched: float
    data_seconds: float


class _Run:
    """One call of `train`: the state of the loop."""

    def __init__(self, config: Config, run_dir: Path, program: Program, data: RunData):
        self.config, self.run_dir, self.program, self.data = config, run_dir, program, data
        self.checkpoints = Checkpoints(run_dir, program.layout, keep=config.checkpoint.keep)
        self.state, self.saved = self._restore()  # after `saved` steps: the newest good checkpoint, None without one
        self.first = self.saved or 0
        self.skipped = self.first - int(self.state.step)  # steps without an update, in all and since the last with one
        self.skipped_in_row = 0
        self.log = RunLog(
            run_dir,
            total_steps=config.train.steps,
            finished_steps=self.first,
            log_every=config.train.log_every,
            write=is_first_process(),
        )
        self.ready = time.perf_counter()  # when the newest metrics were read
        self.validation: Perplexity | None = None
        self.seconds = self.data_seconds = 0.0  # of all steps, and of the host's waiting for their batches

    def go(self) -> None:
        try:
            self._steps()
        finally:
            self.checkpoints.close()
            self.log.close()
        self._summary()

    def _restore(self) -> tuple[TrainState, int | None]:
        state, step, damaged = self.checkpoints.restore_newest()
        for message in damaged:
            _say(f"damaged checkpoint, the one before it is used: {message}")
        if state is None:
            return self.program.layout.init(), None
        self.checkpoints.set_aside(after=step)
        _say(f"resumed from step {step} of {self.run_dir}")
        return state, step

    def _steps(self) -> None:
        config = self.config
        rows = self.program.local_rows
        batches = train_batches(
            self.data.train, rows=rows, global_batch=config.train.global_batch, start_step=self.first
        )
        pending: _Pending | None = None
        step_function = None
        for step in range(self.first + 1, config.train.steps + 1):
            asked = time.perf_counter()
            loaded = next(batches)
            data_seconds = time.perf_counter() - asked
            batch = self.program.put_batch(loaded, rows)
            if step_function is None:
                began = time.perf_counter()
                step_function = train_step(self.program).lower(self.state, batch).compile()
                self.log.print(f"compiled the step in {time.perf_counter() - began:.1f} s")
                give_back_freed_memory()
                self.ready = time.perf_counter()
            dispatched = time.perf_counter()
            self.state, metrics = step_function(self.state, batch)
            if pending:
                self._read(pending)
            pending = _Pending(step, metrics, dispatched, data_seconds)
            if self._due(step, config.train.eval_every) or self._due(step, config.checkpoint.every):
                self._read(pending)
                pending = None
                self._validate_and_save(step)
        self.checkpoints.wait()

    def _due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.config.train.steps

    def _read(self, pending: _Pending) -> None:
        """Wait for a step's metrics and log them."""
        metrics = {name: float(value) for name, value in pending.metrics.items()}
        was_skipped = bool(metrics.pop("skipped"))
        losses = {name: metrics.pop(name) for name in list(metrics) if name.startswith("loss/")}
        now = time.perf_counter()
        seconds = now - max(self.ready, pending.dispatched)
        self.ready = now
        tokens = self.config.train.global_batch * self.config.model.sequence_length
        self.skipped += was_skipped
        self.skipped_in_row = self.skipped_in_row + 1 if was_skipped else 0
        self.seconds += seconds
        self.data_seconds += pending.data_seconds
        times = {"seconds": seconds, "data_seconds": pending.data_seconds}
        self.log.record_step(pending.step, **metrics, losses=losses, skipped_steps=self.skipped, tokens=tokens, **times)
        if was_skipped:
            self._report_skip(pending.step, metrics)

    def _report_skip(self, step: int, metrics: dict[str, float]) -> None:
        """Report a step that every device left out; more than `max_skipped` in a row end the run."""
        reason = f"step {step}: the loss is {metrics['loss']:.6g}, the gradient norm {metrics['grad_norm']:.6g}"
        most = self.config.optimizer.max_skipped
        if self.skipped_in_row > most:
            self._stop(
                f"{reason}: {self.skipped_in_row} steps in a row could not be used (--optimizer.max-skipped {most})"
            )
        if self.config.precision == "fp16":
            reason += f" with loss scale {metrics['loss_scale']:g}"
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            reason += f", far above the recent ones (--optimizer.skip-above {self.config.optimizer.skip_above:g})"
        self.log.print(f"{reason}: skipped")

    def _stop(self, reason: str) -> NoReturn:
        self.checkpoints.wait()
        saved = self.saved
        where = "none yet" if saved is None else f"{self.checkpoints.folder / str(saved)} (step {saved})"
        raise RunError(f"{reason}, so training stops; last good checkpoint: {where}")

    def _validate_and_save(self, step: int) -> None:
        if self._due(step, self.config.train.eval_every):
            batches = self.config.train.eval_batches
            self.validation = self._evaluate(batches)
            named = {name: self._evaluate(batches, samples).loss for name, samples in self.data.validation_sets.items()}
            self.log.record_validation(step, self.validation.loss, named)
            loss = self.validation.loss
        else:  # a checkpoint holds the weights after the step, whose loss nobody has seen yet
            loss = self._evaluate(1).loss
        if not math.isfinite(loss):
            self._stop(f"step {step}: the validation loss after it is {loss}")
        if self._due(step, self.config.checkpoint.every):
            self.checkpoints.save(step, self.state)
            self.saved = step
        self.ready = time.perf_counter()

    def _evaluate(self, batches: int, samples: Samples | None = None) -> Perplexity:
        """Of the validation split, or of other samples."""
        return perplexity(self.program, self.state.params, samples or self.data.validation, batches=batches)

    def _summary(self) -> None:
        steps = self.config.train.steps
        if self.validation is None:
            self.validation = self._evaluate(self.config.train.eval_batches)
        if self.first >= steps:
            _say(
                f"nothing to train: {self.run_dir} has {self.first} steps already and --train.steps is {steps}; "
                "for a new run pass another --run-dir, to go on more steps"
            )
        _say(
            f"validation perplexity {self.validation.perplexity:.2f} (loss {self.validation.loss:.4f}) "
            f"after {max(self.first, steps)} steps"
        )
        if self.seconds:
            _say(f"waited for data: {self.data_seconds / self.seconds:.2%} of the steps' time")
        text = self._sample()
        if text:
            _say(f"a sample:\n{text}")
        _say(f"written to {self.run_dir}:")
        for name, what in _WRITTEN.items():
            if (self.run_dir / name).exists():
                _say(f"  {self.run_dir / name}  {what}")

    def _sample(self) -> str:
        tokenizer, config = self.data.tokenizer, self.config.sample
        if tokenizer is None or config.tokens == 0:
            return ""
        prompt = tokenizer.encode(config.prompt) or [tokenizer.end_of_text]
        one_row = dataclasses.replace(self.config.train, global_batch=self.config.mesh.data, microbatch=1)
        ids = continue_in_windows(
            Program(dataclasses.replace(self.config, train=one_row), self.program.mesh),
            self.state.params,
            prompt,
            num_tokens=config.tokens,
            sampling=Sampling(config.temperature, seed=self.config.seed),
            end=tokenizer.end_of_text,
        )
        return config.prompt + continuation_text(tokenizer, prompt, ids)


_WRITTEN = {
    "config.toml": "the run's configuration, itself a preset",
    "metrics.jsonl": "every step's figures",
    "loss.png": "loss curves",
    "tensorboard": "events for TensorBoard",
    "checkpoints": "state, mesh-independent",
    "data": "tokens and tokenizer",
}


def _say(text: str) -> None:
    if is_first_process():
        print(text, flush=True)
