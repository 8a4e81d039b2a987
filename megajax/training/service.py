"""The process that records a run in Weights & Biases or MLflow: `python -m megajax.training.service`, started by
`training/remote.py`, which writes to its standard input and reads its answers.

Every line is a JSON object. The first says which library and run; then come `{"config": …, "text": …}`,
`{"step": …, "figures": …}`, `{"step": …, "name": …, "text": …}`, and last `{"end": whether the run has finished}`;
without a last one the run was killed. Answers are `{"where": …}` once, `{"problem": …}` and `{"done": true}`.
"""

import html
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

_LAST = 60.0  # seconds after the end of its input, killed run or not, at which this process ends at the latest
_EVERY = 5.0  # seconds between two calls of MLflow's server
_LONGEST = 500  # characters of a parameter, for MLflow


class Recorder(Protocol):
    """A run in a library."""

    where: str

    def config(self, values: Mapping[str, Any], text: str) -> None: ...

    def figures(self, step: int, figures: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def end(self, finished: bool) -> None: ...


class WandbRecorder:
    """A run of Weights & Biases. Its own variables, such as WANDB_PROJECT and WANDB_MODE, say where and whether online;
    its files go to RUN/wandb. Figures are drawn over `step`: one that is computed again after a resume comes again."""

    def __init__(self, about: Mapping[str, Any]):
        import wandb

        self._wandb, run_dir = wandb, Path(about["run_dir"])
        self._run = wandb.init(
            id=about["id"],
            resume="allow",
            name=os.environ.get("WANDB_NAME", run_dir.name),
            project=os.environ.get("WANDB_PROJECT", "megajax"),
            dir=run_dir,
            settings=wandb.Settings(console="off", silent=True, x_stats_pid=about["process"]),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self.where = self._run.url or f"offline, in {run_dir / 'wandb'} (wandb sync sends it)"

    def config(self, values: Mapping[str, Any], text: str) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({"step": step, name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def end(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MlflowRecorder:
    """A run of MLflow. MLFLOW_TRACKING_URI says where, else it is RUN/mlflow/mlflow.db, and MLFLOW_EXPERIMENT_NAME in
    which experiment."""

    def __init__(self, about: Mapping[str, Any]):
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric, run_dir = Metric, Path(about["run_dir"])
        own = run_dir / "mlflow"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            own.mkdir(exist_ok=True)
            uri = f"sqlite:///{own / 'mlflow.db'}"
        self._client, name = MlflowClient(uri), os.environ.get("MLFLOW_EXPERIMENT_NAME", "megajax")
        artifacts = None if os.environ.get("MLFLOW_TRACKING_URI") else (own / "artifacts").as_uri()
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name, artifacts)
        earlier = self._client.search_runs([experiment], f"tags.`megajax.run` = '{about['id']}'")
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {"megajax.run": about["id"]}
            self._id = self._client.create_run(experiment, tags=tags, run_name=run_dir.name).info.run_id
        self._waiting: list[Any] = []
        self._sent = time.monotonic()
        self.where = f"run {self._id} of the experiment {name} in {uri}"

    def config(self, values: Mapping[str, Any], text: str) -> None:
        there = self._client.get_run(self._id).data.params
        for key, value in values.items():
            if key not in there:  # what a run has been started with cannot be changed there
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

    def end(self, finished: bool) -> None:
        self._send()
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


RECORDERS: dict[str, Callable[[Mapping[str, Any]], Recorder]] = {"wandb": WandbRecorder, "mlflow": MlflowRecorder}


def main() -> None:
    """Record what comes until its end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the run, which says here how it ends
    threading.Thread(target=_end_after_input, daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print

    def answer(**content: object) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        recorder = RECORDERS[(about := json.loads(sys.stdin.readline()))["library"]](about)
        answer(where=recorder.where)
        finished = False
        for line in sys.stdin:
            finished = _take(recorder, json.loads(line)) or finished
        recorder.end(finished)
    except Exception as error:
        answer(problem=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        os._exit(1)
    answer(done=True)


def _end_after_input() -> None:
    """Wait until nobody writes to the standard input any more, read or not, and start the clock: SIGALRM ends the
    process whatever the library does."""
    ends = select.poll()
    ends.register(0, 0)  # of a pipe without a writer the end is told, whatever is asked for
    ends.poll()
    signal.setitimer(signal.ITIMER_REAL, _LAST)


def _take(recorder: Recorder, line: Mapping[str, Any]) -> bool:
    """Record a line; whether it says that the run has finished."""
    if "config" in line:
        recorder.config(line["config"], line["text"])
    elif "figures" in line:
        recorder.figures(line["step"], line["figures"])
    elif "name" in line:
        recorder.text(line["step"], line["name"], line["text"])
    return bool(line.get("end"))


if __name__ == "__main__":
    main()
