"""`--profile STEPS`: a trace of some steps, in RUN/profile, and where their time went."""

import contextlib
from pathlib import Path

import jax

from megajax.config import Config, profiled_steps
from megajax.data.files import free_name, scratch
from megajax.errors import UserError
from megajax.host.paths import identity
from megajax.host.processes import is_first_process
from megajax.training.trace_report import report


class StepTrace:
    """Traces the steps of `--profile`, from `first` to `last` (0: none), on process 0, into the folder `profile` of the
    run directory. `finished` steps were taken by earlier starts."""

    def __init__(self, config: Config, run_dir: Path, finished: int):
        self._run_dir, self._folder = run_dir, identity(run_dir)
        self._stack = contextlib.ExitStack()
        self._place: Path | None = None  # while it is traced
        steps = config.train.steps
        self.first, self.last = profiled_steps(config.profile, finished, steps) if config.profile else (0, 0)
        if config.profile and finished < steps and not finished < self.first <= self.last <= steps:
            raise UserError(
                f"--profile {config.profile}: this start takes the steps {finished + 1} to {steps}; valid: some of them"
            )

    @property
    def _is_there(self) -> bool:
        """Whether the run directory was neither removed nor replaced."""
        return self._folder is not None and identity(self._run_dir) == self._folder

    def start(self) -> None:
        """Begin the trace, before the first of its steps and with nothing under way."""
        if not is_first_process() or not self._is_there:
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # which would cost the host more than all it does
        with contextlib.suppress(OSError, RuntimeError):  # `finish` says that there is no trace
            self._place = self._stack.enter_context(scratch(self._run_dir / "profile"))
            jax.profiler.start_trace(self._place, profiler_options=options)

    def close(self) -> None:
        """Give up an unfinished trace."""
        if self._place is not None and self._is_there:
            with contextlib.suppress(OSError, RuntimeError):
                jax.profiler.stop_trace()
            self._place = None
            self._stack.close()

    def finish(self, program_text: str) -> list[str]:
        """End the trace after its last step and put it in its place; returns lines about it. `program_text` is the
        compiled step as HLO text."""
        if not is_first_process():
            return []
        if self._place is None or not self._is_there:  # the trace goes on, to nowhere: JAX would make the folder anew
            return [f"{self._run_dir / 'profile'} could not be written: nothing was traced"]
        try:
            jax.profiler.stop_trace()
            (session,) = (self._place / "plugins" / "profile").iterdir()
            sessions = self._run_dir / "profile" / "plugins" / "profile"
            sessions.mkdir(parents=True, exist_ok=True)
            target = free_name(sessions / session.name)
            session.rename(target)
        except (OSError, RuntimeError, ValueError) as error:
            return [f"{self._run_dir / 'profile'} could not be written: {' '.join(str(error).split())[:300]}"]
        finally:
            self._place = None
            self._stack.close()
        count = self.last - self.first + 1
        title = f"profile of step {self.first}" if count == 1 else f"profile of steps {self.first} to {self.last}"
        try:
            rows = report(target, program_text, count)
        except Exception as error:  # of a format that is JAX's own
            rows = [f"where its time went is not known: {type(error).__name__}: {' '.join(str(error).split())[:200]}"]
        return [f"{title}: {target}", *rows]
