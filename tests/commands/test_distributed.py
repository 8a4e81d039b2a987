"""Several processes are one run."""

import json
import re
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from finetuning import PRESET, SIZE, Finetuning, dev_of
from processes import MESH_222, Commands, Finished, Run, finish, start_several
from results import assert_close_losses, checkpoint_steps, contents, curve, records, validation
from test_seeds import report

MESH = (*MESH_222[:6], "--train.microbatch", 2)
UNPIPED = ("--mesh.data", 4, "--train.microbatch", 2)


def two_processes(commands: Commands, *line: object, code: int = 0) -> list[Finished]:
    """What both said at their end, which has this exit code."""
    ended = [finish(process) for process in start_several(commands, 2, *line)]
    waited = r"--distributed.coordinator \S+: waiting for the other processes, at most 300 s\n"  # on a busy machine
    ended = [replace(process, err=re.sub(waited, "", process.err)) for process in ended]
    assert [process.code for process in ended] == [code, code], ended
    return ended


def train_as_two(
    commands: Commands, run: Path, *arguments: object, mesh: tuple = MESH, code: int = 0
) -> list[Finished]:
    """A run of train.py as two processes, each with half of the mesh's devices."""
    line = ("train.py", commands.preset, "--run-dir", run, "--simulate-devices", 4 if mesh == MESH else 2, *mesh)
    return two_processes(commands, *line, *arguments, code=code)


def assert_silent(process: Finished) -> None:
    """It printed nothing of ours; jaxlib's Gloo prints from C++ threads."""
    assert process.err == ""
    assert not re.search("loss|step|model|mesh|perplexity|written", process.out), process.out


SCRIPT = """
import os, signal, sys
sys.path.insert(0, ".")
import jax
from megajax.commands import train
from megajax.host import processes
from megajax.host.ending import run
from megajax.runs.writing import Write
from megajax.training.loop import Trainer
"""
QUICK = f"""{SCRIPT}
from megajax.training import describe, plot

if __name__ == "__main__":
    describe._step_memory = lambda *_: "memory"  # what has tests of its own: a plan, a picture
    plot.plot_loss = lambda path, *_: path.write_text("curves")
    run(lambda: train.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_two_processes_of_two_devices_are_one_of_four(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """Process 0 alone writes and prints. The long tests validate, and have a pipe and tensors in
    parts as well."""
    run, script = tmp_path / "run", tmp_path / "quick.py"
    script.write_text(QUICK)
    flags = (*UNPIPED, "--simulate-devices", 2, "--train.steps", 3, "--train.eval-every", 0)
    first, second = two_processes(commands, script, commands.preset, "--run-dir", run, *flags)
    assert_close_losses(curve(run), curve(straight.folder)[:3])
    assert len(records(run)) == 3, "each step once"
    assert len(list(run.rglob("events.out.tfevents*"))) == 1 and (run / "loss.png").read_text() == "curves"
    assert checkpoint_steps(run) == [3] and commands.perplexity(run)["loss"] > 0
    assert_silent(second)
    assert "written to " in first.out and first.err == ""


@pytest.mark.full
def test_a_mistake_ends_both_processes(commands: Commands, tmp_path: Path) -> None:
    """Process 0 finds it while the other waits: both end with exit code 2 and one line, and nothing is written."""
    run = tmp_path / "run"
    for done in train_as_two(commands, run, "--data.path", tmp_path / "no.txt", code=2):
        assert len(done.err.splitlines()) == 1
    assert not run.exists()


FAULTY = f"""{SCRIPT}
def failing(plain, faults):
    def method(self):
        if (jax.process_index(), self.step) in faults:
            raise OSError(28, "No space left on device")
        return plain(self)
    return method

if __name__ == "__main__":
    Write._write_part = failing(Write._write_part, [(1, 2)])
    Write._finish = failing(Write._finish, [(0, 4)])
    processes._host = lambda: str(os.getpid())
    run(lambda: train.main(sys.argv[1:]))
"""


@pytest.mark.full
def test_a_write_that_fails_in_one_process_fails_in_all(commands: Commands, tmp_path: Path) -> None:
    """And hangs none: that of step 2 in process 1, that of step 4 in process 0, which joins the parts. Here each
    process is on a host of its own."""
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    flags = (*MESH, "--train.steps", 6, "--checkpoint.every", 2, "--sample.tokens", 0, "--simulate-devices", 4)
    run = tmp_path / "run"
    first, second = two_processes(commands, script, commands.preset, "--run-dir", run, *flags)
    told = [line for line in first.out.splitlines() if "could not be written" in line]
    assert [line.partition(":")[0] for line in told] == [
        f"the checkpoint of step {step} could not be written" for step in (2, 4)
    ]
    assert "\nhosts: 2 with 4 devices each; every tensor group stays on one host\n" in first.out
    assert told[0].endswith("another process could not write its share; training continues (1 of 3 in a row)")
    assert told[1].endswith("no space left on device; training continues (2 of 3 in a row)")
    assert first.err == second.err == ""
    assert checkpoint_steps(run) == [6]

    run = tmp_path / "short"
    line = (script, commands.preset, "--run-dir", run, *flags, "--checkpoint.max-failures", 1)
    for done in two_processes(commands, *line, code=1):
        assert "the checkpoint of step 2 could not be written: " in done.err.splitlines()[-1]
        assert "Traceback" not in done.err
    assert list((run / "checkpoints").iterdir()) == []


SIGNALLED = f"""{SCRIPT}
def compiling(plain):
    def method(self, step, program, batch):
        if step > 1 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, step, program, batch)
    return method

if __name__ == "__main__":
    Trainer._compile = compiling(Trainer._compile)
    run(lambda: train.main(sys.argv[1:]))
"""


@pytest.mark.full
def test_a_signal_to_one_process_where_the_batch_grows(commands: Commands, tmp_path: Path) -> None:
    """While the step of the next size is compiled: both stop behind the same step, and go on to the same numbers."""
    script = tmp_path / "signalled.py"
    script.write_text(SIGNALLED)
    sizes = ("--train.ramp-start", 4, "--train.ramp-increment", 4, "--train.ramp-samples", 8, "--train.steps", 6)
    rare = ("--train.eval-every", 100, "--train.eval-batches", 1, "--checkpoint.every", 100)
    straight, parts, mesh = tmp_path / "straight", tmp_path / "parts", ("--mesh.data", 4, "--train.microbatch", 1)
    commands.train(straight, *sizes, *rare)
    flags = (*sizes, *rare, *mesh, "--simulate-devices", 2)
    two_processes(commands, script, commands.preset, "--run-dir", parts, *flags, code=128 + signal.SIGTERM)
    (step,) = checkpoint_steps(parts)
    assert 2 <= step <= 4 and len(curve(parts)) == step
    first, second = train_as_two(commands, parts, *sizes, *rare, "--profile", "5:6", mesh=mesh)
    assert_silent(second)
    assert "profile of steps 5 to 6" in first.out and list((parts / "profile").rglob("*.xplane.pb"))
    assert_close_losses(curve(parts), curve(straight))


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_stands_still_or_is_killed_ends_the_other(
    commands: Commands, tmp_path: Path, how: signal.Signals
) -> None:
    """Within patience, or soon; the last line names process 1, its host and pid, and the step."""
    run = tmp_path / "run"
    flags = ("--simulate-devices", 4, *MESH, "--train.steps", 10**6, "--train.eval-every", 10**6)
    line = ("train.py", commands.preset, "--run-dir", run, *flags, "--distributed.patience", 5)
    first, second = start_several(commands, 2, *line, "--checkpoint.every", 10**6)
    try:
        while first.poll() is None and not (run / "processes" / "1.json").exists():
            time.sleep(0.1)
        time.sleep(6)  # each has said twice what it does, steps have run
        second.send_signal(how)
        stopped = time.monotonic()
        done = finish(first)
        assert done.code == 1 and time.monotonic() - stopped < 45, done
        lost = "lost " if how == signal.SIGKILL else "(lost )?"
        who = rf"process 1 of 2 on {socket.gethostname()} \(pid {second.pid}\)"
        pattern = rf"error: {lost}{who}.* at step (?P<step>\d+), .*"
        found = re.fullmatch(pattern, done.err.splitlines()[-1])
        assert found and 0 < int(found["step"]) <= len(records(run)) + 1, done.err
        assert not list(run.glob("error-*"))
    finally:
        second.kill()
        second.communicate()


@pytest.mark.full
def test_eval_as_two_processes(commands: Commands, straight: Run) -> None:
    flags = ("perplexity", "--checkpoint", straight.folder, "--simulate-devices", 4, *MESH)
    first, second = two_processes(commands, "eval.py", *flags)
    loss = json.loads(first.out.splitlines()[-1])["loss"]
    assert loss == pytest.approx(validation(straight.folder)[20], rel=1e-6)
    assert_silent(second)


@pytest.mark.full
def test_generate_as_two_processes(commands: Commands, straight: Run) -> None:
    """Rows and heads are split over them; process 0 alone prints, text alone, what one device prints."""
    before = contents(straight.folder)
    line = ("-m", "megajax", "generate", "--checkpoint", straight.folder, "--prompt", "the end", "--max-tokens")
    one = commands.run_process(*line, 8)
    assert straight.finished.out.partition("a sample:\n")[2].startswith(one.ok()) and one.out.startswith("the end")
    assert len(one.err.splitlines()) == 1 and "tokens/s" in one.err
    line = (*line, 20, "--prompt", "A", "--prompt", "nor")
    alone = commands.run(*line)
    assert alone.ok().startswith("--- 1 of 3\nthe end") and "tokens/s" in alone.err, alone
    for mesh in (("--mesh.data", 2, "--mesh.tensor", 2), ("--mesh.tensor", 4)):
        first, second = two_processes(commands, *line, *mesh, "--simulate-devices", 2)
        assert re.sub(r"\[Gloo\][^\n]*\n", "", first.out) == alone.out
        assert second.err == "" and "the end" not in second.out
    assert contents(straight.folder) == before


@pytest.mark.full
def test_a_task_with_two_seeds(tuning: Finetuning, tmp_path: Path) -> None:
    run = tmp_path / "seeds"
    line = ("train.py", PRESET, "--run-dir", run, *SIZE, *tuning.data("mnli"), "--seeds", 2)
    _, second = two_processes(tuning.commands, *line, "--mesh.data", 2, "--simulate-devices", 1)
    assert_silent(second)
    assert_close_losses(curve(run / "seed-0"), curve(tuning.run("mnli")))
    found = report(run)["seeds"]
    assert [entry["accuracy"] for entry in found] == [dev_of(Path(entry["run"]))["accuracy"] for entry in found]
