"""Commands with runs in an object store, moto's S3 server: like those in folders, whatever is killed and refused."""

import contextlib
import json
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from processes import Commands, Run, finish, start_several
from results import assert_same_checkpoint, checkpoint_steps, curve

from megajax.runs import step_folders
from megajax.runs.digests import problem_of, read_manifest
from megajax.runs.store import Store

URL = "s3://bucket/run"
LONG = ("--train.steps", 100, "--optimizer.decay-steps", 100)


@pytest.fixture
def copy(s3: Any) -> Iterator[Any]:
    """Makes a copy of the run as it is now, as a folder; no checkpoint in it may be damaged."""
    made: list[Store] = []

    def pull() -> Path:
        made.append(Store(URL, "RUN"))
        for checkpoint in (made[-1].folder / "checkpoints").glob("[0-9]*"):
            made[-1].fetch(checkpoint)
            assert not problem_of(checkpoint, read_manifest(checkpoint))
        return made[-1].folder

    yield pull
    for store in made:
        store.close()


@pytest.mark.slow
def test_a_run_is_continued_and_read(commands: Commands, straight: Run, copy: Any, tmp_path: Path) -> None:
    """As one in a folder. What is printed names the store."""
    megajax = partial(commands.run, "-m", "megajax")
    done = commands.train(URL, "--train.steps", 10)  # type: ignore[arg-type]
    assert f"step 10/10  checkpoint in {URL}/checkpoints/10" in done.out and "megajax-store" not in done.out
    done = commands.train(URL, "--resume", "must")  # type: ignore[arg-type]
    assert f"resumed from step 10 of {URL}" in done.out
    run = copy()
    assert curve(run) == curve(straight.folder) and checkpoint_steps(run) == [10, 15, 20]
    assert_same_checkpoint(run, straight.folder, 20)
    assert commands.perplexity(URL, "--step", 15) == commands.perplexity(straight.folder, "--step", 15)  # type: ignore[arg-type]
    replayed = megajax("replay", URL, "--steps", 16).ok()
    assert replayed.splitlines()[-1] == f"steps 16 to 16 of {URL}: the same, bit for bit"
    for where, name in ((URL, "stored"), (straight.folder, "local")):
        megajax("convert", "export-hf", where, tmp_path / name).ok()
    stored, local = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("stored", "local"))
    assert stored == local
    told = megajax("generate", "--checkpoint", URL, "--prompt", "the", "--max-tokens", 3, "--json").ok()
    assert json.loads(told)["continuations"][0]["tokens"] == 3
    megajax("convert", "import-hf", tmp_path / "stored", "s3://bucket/imported").ok()
    flags = ("--init", "s3://bucket/imported", "--train.steps", 1, "--model.vocab-multiple", 1024)
    assert "weights: from step 0 of s3://bucket/imported" in commands.train(tmp_path / "begun", *flags).out
    refused = commands.run("train.py", commands.preset, "--run-dir", URL, "--resume", "never")
    assert refused.code == 2 and "already holds a run; valid: a new --run-dir" in refused.err, refused


@pytest.mark.slow
def test_failed_uploads_end_a_run_and_a_signal_lets_one_end(
    commands: Commands, s3: Any, copy: Any, tmp_path: Path
) -> None:
    """After as many failures as `--checkpoint.max-failures`; the next start goes on from what is in the store. SIGTERM
    in the middle of an upload leaves a whole checkpoint."""
    (plugin := tmp_path / "impatient.py").write_text("from megajax.runs import store\n\nstore.PATIENCE = 0.5\n")
    line = ("train.py", commands.preset, *LONG, "--run-dir", URL, "--plugins", plugin)
    uploading = threading.Event()

    def refuse(request: dict[str, Any]) -> str | None:
        return "503" if re.search("checkpoints/(10|15)/", request["PATH_INFO"]) else None

    def delay(request: dict[str, Any]) -> None:
        if "checkpoints/15/" in request["PATH_INFO"]:
            uploading.set()
            time.sleep(0.5)

    s3.fault = refuse
    done = finish(commands.start(*line, "--checkpoint.max-failures", 2))
    assert done.code == 1 and f"last good checkpoint: {URL}/checkpoints/5 (step 5)" in done.err, done
    assert "that is 2 in a row (--checkpoint.max-failures 2), so training stops" in done.err
    assert "the checkpoint of step 10 could not be written" in done.out and "what was not uploaded stays" in done.out
    assert checkpoint_steps(copy()) == [5]
    s3.fault = delay
    process = commands.start(*line)
    assert uploading.wait(120)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 143 and f"resumed from step 5 of {URL}" in done.out, done
    assert 15 in (steps := checkpoint_steps(copy())) and steps[-1] < 100


@pytest.mark.full
def test_kills_and_failures_lose_nothing(commands: Commands, s3: Any, copy: Any, tmp_path: Path) -> None:
    """Killed, and stopped with a grace of 30 s, after a random number of commits, while every tenth request is refused,
    slow, or answered by an error after it was done: no step that was there is lost, no checkpoint is wrong, and the run
    ends as if nothing had been."""
    rng, line = random.Random(0), ("train.py", commands.preset, *LONG, "--run-dir")
    commands.train(tmp_path / "whole", *LONG)
    faults = {"503": lambda: "503", "+500": lambda: "+500", "slow": lambda: time.sleep(0.5)}
    s3.fault = lambda request: faults[rng.choice([*faults])]() if rng.random() < 0.1 else None
    system, saved, told = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False), 0, []
    commits = lambda: max((int(path[-8:]) for path in system.find("bucket/run/commits")), default=0)  # noqa: E731
    for _ in range(12):
        process, until = commands.start(*line, URL), commits() + rng.randint(1, 7)
        while commits() < until and process.poll() is None:
            time.sleep(0.1)
        time.sleep(rng.random())
        process.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        told.append((finish(process).code, max(step_folders.complete(copy() / "checkpoints"), default=0)))
        assert told[-1][0] in (0, -9, 143) and told[-1][1] >= saved, told
        saved = told[-1][1]
    finish(commands.start(*line, URL)).ok()
    assert curve(copy()) == curve(tmp_path / "whole")
    assert_same_checkpoint(copy(), tmp_path / "whole", 100)
    print("exit codes, and steps in the store:", told)


@pytest.mark.full
def test_two_processes_without_a_shared_folder(commands: Commands, s3: Any, copy: Any, tmp_path: Path) -> None:
    """Each uploads its share of a checkpoint; the run goes on in one process."""
    mesh = ("--mesh.data", 2, "--mesh.tensor", 2, "--train.microbatch", 2)
    line = ("train.py", commands.preset, *mesh, "--simulate-devices")
    for where in (URL, tmp_path / "run"):
        processes = start_several(commands, 2, *line, 2, "--run-dir", where, "--train.steps", 10)
        for process in processes:
            finish(process).ok()
        commands.run(*line, 4, "--run-dir", where).ok()
    assert curve(copy()) == curve(tmp_path / "run")
    assert_same_checkpoint(copy(), tmp_path / "run", 20)
