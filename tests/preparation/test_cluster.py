"""A preparation on a Dask cluster: the same bytes, though workers are killed and a scheduler is lost."""

import collections
import importlib.util
import json
import operator
import os
import resource
import signal
import socket
import threading
import time
from concurrent.futures import CancelledError

import pytest
from test_planted import DIFFERENT, files, plant, prepare, prepare_with, report
from tiny import full

from megajax.commands.prepare import main
from megajax.core.errors import RunError, UserError
from megajax.preparation import cluster, shards
from megajax.preparation.shards import WorkFolder

NEEDS_DASK = pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None, reason="needs dask[distributed] (the extra `cluster`)"
)


@NEEDS_DASK
@pytest.mark.parametrize("count", [1, full(2)])
@pytest.mark.slow
def test_the_same_bytes_after_a_full_disk_and_a_killed_worker(tmp_path, monkeypatch, count):
    monkeypatch.setattr("megajax.preparation.division.SHARD_BYTES", (1 << 14, 1 << 14, 1 << 14))
    monkeypatch.setattr("megajax.preparation.corpus._GROUP", (16, 64))
    planted = plant(tmp_path, documents=80, near=20, leaked=6, exact=4)
    prepare(planted, tmp_path / "alone")

    def kill(victim: int) -> None:
        while not list(tmp_path.glob("cluster.work/data-*/clean-000001.npz")):
            time.sleep(0.01)
        os.kill(victim, signal.SIGKILL)

    with cluster.connected(f"local:{count}") as workers:
        victim, other = workers.run("reading", os.getpid, [(), ()])
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        for worker in {victim, other}:
            resource.prlimit(worker, resource.RLIMIT_FSIZE, (1 << 13, most))  # fails like a full disk
        problem = r"work/data-\w+/\S+ cannot be written: File too large; valid: .* rerun the command to resume$"
        with pytest.raises(UserError, match=problem):
            prepare_with(workers, planted, tmp_path / "cluster")
        assert [path.name for path in tmp_path.glob("cluster*")] == ["cluster.work"]
        for worker in {victim, other}:
            resource.prlimit(worker, resource.RLIMIT_FSIZE, (most, most))
        killing = threading.Thread(target=kill, args=(victim,))
        killing.start()
        prepare_with(workers, planted, tmp_path / "cluster")
        killing.join()
    assert files(tmp_path / "alone") == files(tmp_path / "cluster")
    once, again = report(tmp_path / "alone"), report(tmp_path / "cluster")
    assert {key for key in once if once[key] != again[key]} <= DIFFERENT | {"resumed"}
    done = again["workers"]
    assert done.keys() == {"reading", "cleaning", "tokenizer", "analysis", "duplicates", "writing"}
    pieces = sum(worker["pieces"] for worker in done["cleaning"].values())
    assert pieces == sum(worker["pieces"] for worker in done["analysis"].values()) > 4
    assert str(os.getpid()) not in {who.rpartition(":")[2] for stage in done.values() for who in stage}


class Scheduler:
    """In place of Dask's client: one that is lost after some results."""

    status = "pending"

    def __init__(self, results: int, lost: Exception | None = None) -> None:
        self.results, self.given, self.lost = results, 0, lost or CancelledError()

    def submit(self, function, *arguments, pure):
        self.given += 1
        if self.results <= -2:
            raise RuntimeError("closed")
        given = lambda timeout: self.result(function, *arguments)  # noqa: E731
        return collections.namedtuple("Future", "result status")(given, self.status)

    def result(self, function, *arguments):
        self.results -= 1
        if self.results < 0:
            raise self.lost
        return function(*arguments)

    def nthreads(self):
        return {"one": 1}

    def close(self, timeout):
        pass


@NEEDS_DASK
def test_a_scheduler_that_is_lost_and_comes_again(monkeypatch):
    """What was given to it is given to the next one, in order; a message says that it is waited for."""
    schedulers = [Scheduler(3), Scheduler(0, ConnectionResetError("while a result is gathered")), Scheduler(99)]
    connections = iter([schedulers[0], OSError("refused"), schedulers[1], schedulers[2]])
    said = []

    def connect(_):
        found = next(connections)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(cluster._Dask, "_connect", connect)
    monkeypatch.setattr(cluster, "warn", said.append)
    monkeypatch.setattr(cluster.time, "sleep", lambda _: None)
    workers = cluster._Dask("tcp://somewhere:1", 1.0)
    assert list(workers.run("a stage", operator.neg, ((number,) for number in range(12)))) == [-n for n in range(12)]
    assert said == ["the scheduler of tcp://somewhere:1 is lost; waiting for it"] * 2
    assert schedulers[0].given == 8 and schedulers[1].given == 5

    monkeypatch.setattr(cluster, "_PATIENCE", -1)
    connections = iter([Scheduler(1), OSError("refused")])
    workers = cluster._Dask("tcp://somewhere:1", 1.0)
    with pytest.raises(RunError, match=r"^--cluster tcp://\S+: the scheduler is lost \(refused\); rerun the command"):
        list(workers.run("a stage", operator.neg, [(1,), (2,)]))

    for error in OSError("disk full"), TimeoutError("of the task"):
        connections = iter([failing := Scheduler(0, error)])
        failing.status = "error"
        with pytest.raises(type(error), match=str(error)):
            list(cluster._Dask("tcp://somewhere:1", 1.0).run("a stage", operator.neg, [(1,)]))


@NEEDS_DASK
def test_where_no_scheduler_answers(tmp_path, monkeypatch):
    """Nobody listens, something else does and is silent, or a file holds no address: one line, soon."""
    monkeypatch.setattr(cluster, "_CONNECT", 0.2)
    monkeypatch.setattr(cluster, "_GRACE", 0.1)
    (tmp_path / "scheduler.json").write_text(json.dumps({"address": "tcp://127.0.0.1:9"}))
    odd = ["", "{}", "null", "[1]", '{"address": 3}', "[" * 1000, "\0"]
    for number, content in enumerate(odd):
        (tmp_path / f"{number}").write_text(content)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for where, problem in {
            "tcp://127.0.0.1:9": "Timed out .*",
            tmp_path / "scheduler.json": "Timed out .*",
            "nonsense://a": "unknown address scheme .*",
            f"tls://{address}": "TLS .*",
            **{tmp_path / f"{number}": "this file holds no address of one" for number in range(len(odd))},
            f"tcp://{address}": "nothing in 0 s",
        }.items():
            with (
                pytest.raises(
                    UserError, match=rf"^--cluster \S+: no scheduler answers: {problem}; valid: a scheduler's"
                ),
                cluster.connected(str(where)),
            ):
                pass


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--cluster local:0", r"--cluster local:0; valid: local:1 to local:9999"),
        ("--cluster local:2 --workers 2", "--workers 2 with --cluster: a cluster has its own; valid: one of the two"),
        ("--cluster local:2", r"distributed is missing; valid: pip install 'megajax\[cluster\]'$"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, flags, problem):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "missing" in problem else name)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=problem):
        main([str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), *flags.split()])


@NEEDS_DASK
@pytest.mark.parametrize("by_scheduler", [True, False])
def test_machines_without_the_package(by_scheduler):
    """Whether the scheduler or a worker reads the task."""

    class Failed:
        def result(self, timeout):
            error = ModuleNotFoundError("No module named 'megajax'")
            if by_scheduler:
                raise RuntimeError("Error during deserialization") from error
            raise error

    found = object.__new__(cluster._Dask)
    found._cluster = "tcp://there:1"
    line = "--cluster tcp://there:1: .* other packages .No module named 'megajax'.; valid: the same environment"
    with pytest.raises(UserError, match=line):
        found._next(print, collections.deque([[(), Failed()]]))


def test_a_worker_with_another_environment():
    here = cluster._environment()
    assert cluster._perform(here, operator.neg, (1,))[0] == -1
    with pytest.raises(UserError, match=r"a worker on \S+ has megajax \S+, but .* was started with megajax 0; valid: "):
        cluster._perform((here[0], "megajax 0", *here[2:]), operator.neg, (1,))


def test_a_file_system_that_is_slow_to_show_files(tmp_path, monkeypatch):
    """What another machine wrote is waited for; only so long, and on one machine not at all."""
    work = WorkFolder(tmp_path, "x", shared=True)
    later = threading.Timer(0.3, WorkFolder(tmp_path, "x").save, ("clean", 1, {}, {"documents": 3}))
    later.start()
    assert work.read_summary("clean", 1) == {"documents": 3}
    later.join()
    monkeypatch.setattr(shards, "_PATIENCE", 0.1)
    for folder in work, WorkFolder(tmp_path, "x"):
        with pytest.raises(UserError, match=r"clean-000002\.npz: No such file .*; valid: --overwrite"):
            folder.read_summary("clean", 2)
