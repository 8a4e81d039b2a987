"""`--track wandb|mlflow`: another library records the run, in a thread. Whatever happens to that library, the run
continues and waits for nothing."""

import html
import importlib.util
import json
import logging
import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.host import reading
from megajax.host.ending import Exit
from megajax.host.files import write_atomically
from megajax.training.trackers import Tracker

LIBRARIES = {"wandb": "Weights & Biases", "mlflow": "MLflow"}
_IDS = "tracking.json"  # in the run directory: the id of the run in each library
_MOST = 10_000  # records that may wait for the library
_LAST = 60.0  # seconds that the library gets at the end of a run
_LAST_OF_STOPPED = 10.0  # and at the end of a stopped run, to which a cluster gives little time
_EVERY = 5.0  # seconds between requests to MLflow's server
_LONGEST = 500  # characters of a parameter in MLflow


def check_installed(name: str) -> None:
    """Check that the library of `--track` is installed."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # a folder with that name is not the library
        raise UserError(f"--track {name}: {LIBRARIES[name]} is not installed; valid: pip install 'megajax[{name}]'")


class LibraryTracker(Tracker):
    """A run recorded by one of the `LIBRARIES`; a resumed run continues its record there."""

    def __init__(self, library: str, run_dir: Path):
        self.name = LIBRARIES[library]
        self._calls: queue.Queue[Callable[[Tracker], None]] = queue.Queue(_MOST)
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._problem, self._ended = "", False
        run = library, run_dir.resolve(), _id_of(run_dir, library)
        self._thread = threading.Thread(target=self._record, args=run, daemon=True)
        self._thread.start()

    def config(self, text: str, values: Mapping[str, object]) -> None:
        self._put(lambda tracker: tracker.config(text, values))

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        finite = {name: each for name, each in figures.items() if math.isfinite(each)}
        self._put(lambda tracker: tracker.figures(step, finite))

    def text(self, step: int, name: str, text: str) -> None:
        self._put(lambda tracker: tracker.text(step, name, text))

    def news(self) -> list[str]:
        return [self._news.get() for _ in range(self._news.qsize())]

    def close(self, *, finished: bool) -> None:
        """Wait for the library, but only for a limited time."""

        def end(tracker: Tracker) -> None:
            tracker.close(finished=finished)
            self._ended = True

        try:
            self._put(end)
            self._thread.join(_LAST if finished else _LAST_OF_STOPPED)
        finally:
            if self._thread.is_alive():
                Exit.at_once = True
                self._problem = "it did not finish in time; unsent records are in the run directory"
        if self._problem:
            raise OSError(self._problem)

    def _put(self, call: Callable[[Tracker], None]) -> None:
        """Raises `OSError` if the library has failed or cannot keep up."""
        if self._problem:
            raise OSError(self._problem)
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise OSError(f"it is too slow: {_MOST} records are waiting") from None

    def _record(self, library: str, run_dir: Path, name: str) -> None:
        """The thread: makes all calls to the library, in order, until the last one or the first error."""
        try:
            tracker = _TRACKERS[library](run_dir, name)
            self._news.put(f"{self.name}: {tracker.where}")
            while not self._ended:
                self._calls.get()(tracker)
        except BaseException as error:  # libraries raise SystemExit and KeyboardInterrupt too
            self._problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _id_of(run_dir: Path, library: str) -> str:
    """The id of the run in a library, generated at its first start."""
    file, known = run_dir / _IDS, {}
    if reading.kind(file):
        known = reading.read_json(file)
        if not isinstance(known, dict) or not all(isinstance(each, str) and each.isalnum() for each in known.values()):
            raise UserError(f"{file} does not contain run names; valid: the file as megajax wrote it, or none")
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
        self._metric, own = Metric, run_dir / "mlflow"
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            own.mkdir(exist_ok=True)
            uri, artifacts = f"sqlite:///{own / 'mlflow.db'}", (own / "artifacts").as_uri()
        self._client, title = MlflowClient(uri), os.environ.get("MLFLOW_EXPERIMENT_NAME", "megajax")
        found = self._client.get_experiment_by_name(title)
        experiment = found.experiment_id if found else self._client.create_experiment(title, artifacts)
        earlier = self._client.search_runs([experiment], f"tags.`megajax.run` = '{name}'")
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {"megajax.run": name}
            self._id = self._client.create_run(experiment, tags=tags, run_name=run_dir.name).info.run_id
        self._waiting: list[Any] = []
        self._sent = time.monotonic()
        self.where = f"run {self._id} of the experiment {title} in {uri}"

    def config(self, text: str, values: Mapping[str, object]) -> None:
        there = self._client.get_run(self._id).data.params
        for key, value in values.items():
            if key not in there:  # MLflow does not allow changing a parameter
                self._client.log_param(self._id, key, str(value)[:_LONGEST])
        self._client.log_text(self._id, text, "config.toml")

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._waiting += [self._metric(name, value, now, step) for name, value in figures.items()]
        if len(self._waiting) > 500 or time.monotonic() - self._sent > _EVERY:
            self._send()

    def _send(self) -> None:
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:1000])
            del self._waiting[:1000]
        self._sent = time.monotonic()

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{name}/step-{step}.txt")

    def close(self, *, finished: bool) -> None:
        self._send()
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


_TRACKERS: dict[str, type[WandbTracker | MlflowTracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}
