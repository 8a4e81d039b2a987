"""`--profile STEPS`: a trace of some steps in RUN/profile, which XProf and Perfetto open."""

import contextlib
from pathlib import Path

import jax

from megajax.host.files import free_name, scratch
from megajax.host.paths import identity
from megajax.host.processes import is_first_process, say
from megajax.settings.config import Config, profiled_steps


class StepTrace:
    """Profiles the steps `first` to `last` (0: none) of `--profile` on process 0, into the folder `profile` of the run
    directory. Earlier starts have `finished` steps."""

    def __init__(self, config: Config, finished: int):
        self._run_dir, self._folder = Path(config.run_dir), identity(config.run_dir)
        self._stack = contextlib.ExitStack()
        self._place: Path | None = None  # set while tracing
        steps = config.train.steps
        self.first = self.last = 0
        if not config.profile or finished >= steps:
            return
        first, last = profiled_steps(config.profile, finished, steps)
        if finished < first and last <= steps:
            self.first, self.last = first, last
        else:
            say(
                f"--profile {config.profile}: nothing is traced, because this start trains steps "
                f"{finished + 1} to {steps}"
            )

    @property
    def _is_there(self) -> bool:
        """Whether the run directory has been neither removed nor replaced."""
        return self._folder is not None and identity(self._run_dir) == self._folder

    def start(self) -> None:
        """Start tracing, before the first step to trace and while nothing is running."""
        if not is_first_process() or not self._is_there:
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # tracing Python would cost the host more than all its work
        with contextlib.suppress(OSError, RuntimeError):  # `finish` reports that there is no trace
            self._place = self._stack.enter_context(scratch(self._run_dir / "profile"))
            jax.profiler.start_trace(self._place, profiler_options=options)

    def close(self) -> None:
        """Drop an unfinished trace."""
        if self._place is not None and self._is_there:
            with contextlib.suppress(OSError, RuntimeError):
                jax.profiler.stop_trace()
            self._place = None
            self._stack.close()

    def finish(self) -> str:
        """Stop tracing after the last step; returns a line about it."""
        if not is_first_process():
            return ""
        if self._place is None or not self._is_there:  # leave it running: stopping would make JAX recreate the folder
            return f"{self._run_dir / 'profile'} could not be written: nothing was profiled"
        try:
            jax.profiler.stop_trace()
            (session,) = (self._place / "plugins" / "profile").iterdir()
            sessions = self._run_dir / "profile" / "plugins" / "profile"
            sessions.mkdir(parents=True, exist_ok=True)
            target = free_name(sessions / session.name)
            session.rename(target)
        except (OSError, RuntimeError, ValueError) as error:
            return f"{self._run_dir / 'profile'} could not be written: {' '.join(str(error).split())[:300]}"
        finally:
            self._place = None
            self._stack.close()
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"profile of {steps}: {target}"
