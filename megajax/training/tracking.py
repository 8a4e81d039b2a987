"""`--track wandb|mlflow`: another library records the run. Whatever happens to its server, the run continues and waits
for nothing."""

import html
import json
import logging
import math
import os
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from operator import methodcaller
from pathlib import Path
from typing import Any

from megajax.core.errors import Damaged
from megajax.host import reading
from megajax.host.ending import Exit
from megajax.host.files import write_atomically
from megajax.settings.checks import LIBRARIES
from megajax.training.trackers import Tracker

_IDS = "tracking.json"  # in the run directory: the id of the run in each library
_LAST = 60.0  # seconds that the library gets at the end of a run
_LAST_OF_STOPPED = 10.0  # and at the end of a stopped run, to which a cluster gives little time
_EVERY = "5"  # seconds between requests to MLflow's server
_SENT = 100  # of the last figures sent to MLflow, whose errors the end tells
_LONGEST = 500  # characters of a parameter in MLflow


class LibraryTracker(Tracker):
    """A run recorded by one of the `LIBRARIES`; a resumed run continues its record there.

    Figures go to the library's own queue. Start, texts and end, for which it may wait for a server, are a thread's; it
    also passes on the figures from before the start.
    """

    def __init__(self, library: str, run_dir: Path):
        self.name, self._problem = LIBRARIES[library], ""
        self._news: list[str] = []
        self._tracker: Tracker | None = None
        self._calls: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        run = library, run_dir.resolve(), _id_of(run_dir, library)
        self._thread = threading.Thread(target=self._work, args=run, daemon=True)
        self._thread.start()

    def config(self, text: str, values: Mapping[str, object]) -> None:
        self._later(methodcaller("config", text, values))

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        finite = {name: each for name, each in figures.items() if math.isfinite(each)}
        if self._problem or self._tracker is None:
            self._later(methodcaller("figures", step, finite))
            return
        try:
            self._tracker.figures(step, finite)
        except Exception as error:
            self._problem = _words(error)
            raise OSError(self._problem) from None

    def text(self, step: int, name: str, text: str) -> None:
        self._later(methodcaller("text", step, name, text))

    def news(self) -> list[str]:
        news, self._news = self._news, []
        return news

    def close(self, *, finished: bool) -> None:
        """Wait for the library, but only for a limited time."""
        self._later(methodcaller("close", finished=finished))
        self._calls.put(None)
        try:
            self._thread.join(_LAST if finished else _LAST_OF_STOPPED)
        finally:
            if self._thread.is_alive():
                Exit.at_once = True
                self._problem = "it did not finish in time; unsent records are in the run directory"
        if self._problem:
            raise OSError(self._problem)

    def _later(self, call: Callable[[Tracker], None]) -> None:
        """Have the thread make a call; raises `OSError` if the library has failed."""
        if self._problem:
            raise OSError(self._problem)
        self._calls.put(call)

    def _work(self, library: str, run_dir: Path, name: str) -> None:
        """The thread: starts the library, and makes the calls in order until the last one or the first error."""
        try:
            self._tracker = tracker = _TRACKERS[library](run_dir, name)
            self._news = [f"{self.name}: {tracker.where}"]
            while call := self._calls.get():
                call(tracker)
        except BaseException as error:  # libraries raise SystemExit and KeyboardInterrupt too
            self._problem = _words(error)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _id_of(run_dir: Path, library: str) -> str:
    """The id of the run in a library, generated at its first start."""
    file, known = run_dir / _IDS, {}
    if reading.kind(file):
        known = reading.read_json(file)
        if not isinstance(known, dict) or not all(isinstance(each, str) and each.isalnum() for each in known.values()):
            raise Damaged(file, "does not contain run names", "the file as megajax wrote it, or none")
    if library not in known:
        known = known | {library: uuid.uuid4().hex[:12]}
        write_atomically(file, json.dumps(known) + "\n")
    return known[library]


class WandbTracker(Tracker):
    """A run in Weights & Biases. Its own variables, such as WANDB_PROJECT and WANDB_MODE, say where and whether online;
    its files are in RUN/wandb. Figures are plotted over `step`; recomputed after a resume, they appear twice."""

    def __init__(self, run_dir: Path, name: str):
        import wandb

        self._wandb, settings = wandb, wandb.Settings(console="off", silent=True)
        wandb.setup(settings)  # otherwise `init` asks for a missing key on the terminal
        self._run = wandb.init(
            id=name,
            resume="allow",
            name=os.environ.get("WANDB_NAME", run_dir.name),
            project=os.environ.get("WANDB_PROJECT", "megajax"),
            dir=run_dir,
            reinit="create_new",  # otherwise `init` returns a run that the calling program has open
            settings=settings,
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self.where = self._run.url or f"offline, in {run_dir / 'wandb'} (wandb sync sends it)"

    def config(self, text: str, values: Mapping[str, object]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({"step": step, name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MlflowTracker(Tracker):
    """A run of MLflow at MLFLOW_TRACKING_URI (or RUN/mlflow/mlflow.db), in the experiment MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, run_dir: Path, name: str):
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        for loud in ("mlflow", "alembic"):  # they set their levels when imported
            logging.getLogger(loud).setLevel(logging.CRITICAL)
        self._metric, folder = Metric, run_dir / "mlflow"
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            folder.mkdir(exist_ok=True)
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        self._client, title = MlflowClient(uri), os.environ.get("MLFLOW_EXPERIMENT_NAME", "megajax")
        existing = self._client.get_experiment_by_name(title)
        experiment = existing.experiment_id if existing else self._client.create_experiment(title, artifacts)
        earlier = self._client.search_runs([experiment], f"tags.`megajax.run` = '{name}'")
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {"megajax.run": name}
            self._id = self._client.create_run(experiment, tags=tags, run_name=run_dir.name).info.run_id
        os.environ.setdefault("MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS", _EVERY)
        self._sent: deque[Any] = deque(maxlen=_SENT)
        self.where = f"run {self._id} of the experiment {title} in {uri}"

    def config(self, text: str, values: Mapping[str, object]) -> None:
        there = self._client.get_run(self._id).data.params
        for key, value in values.items():
            if key not in there:  # MLflow does not allow changing a parameter
                self._client.log_param(self._id, key, str(value)[:_LONGEST])
        self._client.log_text(self._id, text, "config.toml")

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in figures.items()]
        self._sent.append(self._client.log_batch(self._id, metrics=metrics, synchronous=False))

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{name}/step-{step}.txt")

    def close(self, *, finished: bool) -> None:
        for operation in self._sent:
            operation.wait()
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


_TRACKERS: dict[str, type[WandbTracker | MlflowTracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}
