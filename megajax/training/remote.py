"""`--track wandb|mlflow`: a run recorded by another library, in a process of its own (`training/service.py`) that gets
lines of JSON. Whatever becomes of that process, the run goes on and waits for nothing."""

import contextlib
import importlib.util
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax import reading
from megajax.config import Config
from megajax.data.files import write_atomically
from megajax.errors import UserError
from megajax.processes import is_first_process
from megajax.training.run_log import RunLog
from megajax.training.tracker import Tracker

LIBRARIES = {"wandb": "Weights & Biases", "mlflow": "MLflow"}
_IDS = "tracking.json"  # in the run directory: by what name a library knows the run
_MOST = 10_000  # lines that wait for the process
_LAST = 60.0  # seconds that it has at the end of a run
_LAST_OF_STOPPED = 10.0  # and where the run was stopped, which a cluster gives little time


def check_installed(name: str) -> None:
    """Check that the library of `--track` is there.

    Raises:
        UserError: it is not.
    """
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # a folder of that name is none
        raise UserError(f"--track {name}: {LIBRARIES[name]} is not installed; valid: pip install 'megajax[{name}]'")


def open_log(config: Config, run_dir: Path, finished: int) -> RunLog:
    """The log of a run that goes on after so many steps, with the library that `--track` names.

    Raises:
        UserError: the run directory cannot be written.
    """
    is_over = finished >= config.train.steps
    return RunLog(
        run_dir,
        total_steps=config.train.steps,
        finished_steps=finished,
        log_every=config.train.log_every,
        write=is_first_process(),
        others=lambda: [] if is_over or config.track == "none" else [Remote(config.track, run_dir)],
    )


class Remote(Tracker):
    """A run as one of these libraries records it; a run that goes on is the same one there.

    Args:
        library: "wandb" or "mlflow".
        run_dir: of the run; what the library writes goes to a folder of it.

    Raises:
        UserError: the run directory cannot be written.
        OSError: no process can be started.
    """

    def __init__(self, library: str, run_dir: Path):
        self.name = LIBRARIES[library]
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST)
        self._news: queue.Queue[str] = queue.Queue()
        self._problem = ""
        about = {"library": library, "run_dir": str(run_dir.resolve()), "id": _id_of(run_dir, library)}
        package = str(Path(reading.__file__).parents[1])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megajax.training.service"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals from the keyboard are for the run
        )
        self._put(about | {"process": os.getpid()})
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._listen)]
        for thread in self._threads:
            thread.start()

    def config(self, text: str, values: Mapping[str, object]) -> None:
        self._put({"config": dict(values), "text": text})

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        self._put({"step": step, "figures": {name: each for name, each in figures.items() if math.isfinite(each)}})

    def text(self, step: int, name: str, text: str) -> None:
        self._put({"step": step, "name": name, "text": text})

    def news(self) -> list[str]:
        news = []
        while not self._news.empty():
            news.append(self._news.get())
        return news

    def close(self, *, finished: bool) -> None:
        """Wait for the process, but not for long."""
        until = time.monotonic() + (_LAST if finished else _LAST_OF_STOPPED)
        try:
            self._put({"end": finished})
            self._lines.put(None, timeout=1)
            self._process.wait(until - time.monotonic())
            self._threads[1].join(1)
            if self._problem:
                raise OSError(self._problem)
        except (subprocess.TimeoutExpired, queue.Full):
            raise OSError("it did not end in time; what it has not sent is in the run directory") from None
        finally:
            self._end()

    def _end(self) -> None:
        """End the process and what it has started, if it still runs."""
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except OSError:
                self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(1)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def _put(self, line: Mapping[str, Any]) -> None:
        """Raises `OSError` if the process has failed, or does not follow."""
        if self._problem:
            raise OSError(self._problem)
        try:
            self._lines.put_nowait(json.dumps(line) + "\n")
        except queue.Full:
            raise OSError(f"it takes too long, {_MOST} records wait for it") from None

    def _write(self) -> None:
        assert self._process.stdin
        try:
            while (line := self._lines.get()) is not None:
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
            self._process.stdin.close()
        except (OSError, ValueError):
            pass  # it has ended: `_listen` knows why

    def _listen(self) -> None:
        assert self._process.stdout
        answers = []
        for line in self._process.stdout:
            answers.append(json.loads(line))
            if where := answers[-1].get("where"):
                self._news.put(f"{self.name}: {where}")
        self._process.wait()
        if self._process.returncode or not answers or "done" not in answers[-1]:
            said = answers[-1].get("problem") if answers else ""
            self._problem = said or f"its process ended with exit code {self._process.returncode}"


def _id_of(run_dir: Path, library: str) -> str:
    """By what a library knows a run, made up at its first start."""
    file, known = run_dir / _IDS, {}
    if reading.kind(file):
        known = reading.read_json(file)
        if not isinstance(known, dict) or not all(isinstance(each, str) and each.isalnum() for each in known.values()):
            raise UserError(f"{file} does not hold the names of a run; valid: the file as megajax wrote it, or none")
    if library not in known:
        known = known | {library: uuid.uuid4().hex[:12]}
        write_atomically(file, json.dumps(known) + "\n")
    return known[library]
