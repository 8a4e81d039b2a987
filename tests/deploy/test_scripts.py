"""deploy/: what the batch scripts do at the time limit, with programs in the place of SLURM's; what the container file
installs."""

import os
import re
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PREPARE = ROOT / "deploy" / "prepare.sbatch"
SCRIPTS = sorted(set((ROOT / "deploy").glob("*.sbatch")) - {PREPARE})
EACH_GPU = ROOT / "deploy" / "each-gpu.sh"
SHELL = [*SCRIPTS, PREPARE, EACH_GPU, *sorted((ROOT / "benchmarks").glob("*.sh"))]

PROGRAMS = {
    # A run that says that it runs, and on SIGTERM writes its checkpoint, for a moment, before it ends.
    "srun": """
while [[ $1 == -* ]]; do echo "$1" >>flags; shift; done
echo "$@" >ran
if [[ -f code ]]; then exit "$(<code)"; fi
trap 'sleep 0.2; echo saved >saved; exit 143' TERM
echo $$ >pid
for _ in {1..200}; do sleep 0.05; done
exit 9
""",
    "scancel": 'echo "$@" >cancelled; kill -TERM "$(<pid)"',
    "scontrol": 'echo "$@" >requeued',
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder to run a batch script in; what SLURM's programs were told stands in its files."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text.strip()}\n")
        (programs / name).chmod(0o755)
    return tmp_path


def _start(script: Path, job: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "PATH": f"{job / 'programs'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "8",
    }
    words = ["bash", str(script), "demo", "--data.path", "a corpus"]
    return subprocess.Popen(words, cwd=job, env=environment, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_time_limit(script: Path, job: Path) -> None:
    """SIGUSR1 stops the run with a checkpoint, the script waits for it, and the job goes back in the queue."""
    process = _start(script, job)
    for _ in range(200):
        if (job / "pid").exists() and (job / "pid").read_text():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 143
    assert (job / "ran").read_text() == "megajax train demo --data.path a corpus\n"
    assert "--cpus-per-task=8\n" in (job / "flags").read_text()
    assert (job / "cancelled").read_text() == "--signal=TERM 7\n"
    assert (job / "saved").exists() and (job / "requeued").read_text() == "requeue 7\n"


@pytest.mark.parametrize("code", [0, 1, 2, 143])
def test_other_ends(code: int, job: Path) -> None:
    """What ends by itself, by an error or because it was cancelled is not put back."""
    (job / "code").write_text(f"{code}\n")
    assert _start(SCRIPTS[0], job).wait(20) == code
    assert not (job / "requeued").exists()


@pytest.mark.parametrize("at_limit", [False, True])
def test_prepare(at_limit: bool, job: Path) -> None:
    """The command is given the scheduler's file; at the time limit it is stopped, and goes on later.
    A lost node does not end the job."""
    programs = {
        "srun": 'echo "$@" >workers; exec sleep 30',
        "dask": 'echo x >"$3"; exec sleep 30',
        "megajax": PROGRAMS["srun"],
    }
    for name, text in programs.items():
        (job / "programs" / name).write_text(f"#!/usr/bin/env bash\n{text.strip()}\n")
        (job / "programs" / name).chmod(0o755)
    if not at_limit:
        (job / "code").write_text("0\n")
    process = _start(PREPARE, job)
    for _ in range(200 if at_limit else 0):
        if (job / "pid").exists() and (job / "pid").read_text():
            process.send_signal(signal.SIGUSR1)
            break
        time.sleep(0.05)
    assert process.wait(20) == (143 if at_limit else 0)
    assert (job / "ran").read_text() == f"prepare demo --data.path a corpus --cluster {job}/scheduler-7.json\n"
    assert (job / "requeued").exists() == at_limit and not (job / "scheduler-7.json").exists()
    assert "\n#SBATCH --no-kill\n" in PREPARE.read_text()
    assert not at_limit or "--no-kill dask worker" in (job / "workers").read_text()


def test_prepare_without_dask(job: Path) -> None:
    """A scheduler that does not start is not waited for."""
    (job / "programs" / "dask").write_text("#!/usr/bin/env bash\nexit 1\n")
    (job / "programs" / "megajax").write_text("#!/usr/bin/env bash\nexit 2\n")
    for name in "dask", "megajax":
        (job / "programs" / name).chmod(0o755)
    assert _start(PREPARE, job).wait(20) == 2


def test_the_manifest_names_what_is_there() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML (the extra `cluster`)")
    parts = list(yaml.safe_load_all((ROOT / "deploy" / "prepare.yaml").read_text()))
    kinds = [part["kind"] for part in parts]
    assert kinds == ["Service", "NetworkPolicy", "Deployment", "Deployment", "Job"]
    pods = [part["spec"]["template"] for part in parts[2:]]
    (selector,) = [part["spec"]["selector"] for part in parts if part["kind"] == "Service"]
    assert [pod["metadata"]["labels"] for pod in pods].count(selector) == 1
    commands = [pod["spec"]["containers"][0]["command"] for pod in pods]
    assert all(f"tcp://{parts[0]['metadata']['name']}:8786" in command for command in commands[1:])


@pytest.mark.parametrize("script", SHELL, ids=lambda script: script.name)
def test_the_shell_reads_it(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    is_run = script.suffix == ".sh" and script.read_text().startswith("#!")  # others are sourced or for sbatch
    assert os.access(script, os.X_OK) == is_run


def test_a_process_for_each_gpu(tmp_path: Path) -> None:
    """Each has a number and its GPU; a signal stops all, and the first exit code that is not 0 is that of all."""
    script = """
trap 'sleep 0.2; exit 143' TERM
echo "$JAX_LOCAL_DEVICE_IDS $*" >started-$JAX_LOCAL_DEVICE_IDS
if [[ -f code ]]; then exit "$((JAX_LOCAL_DEVICE_IDS ? $(<code) : 0))"; fi
for _ in {1..200}; do sleep 0.05; done
"""
    command = ["bash", "-c", script, "megajax", "train", "demo"]
    environment = os.environ | {"GPUS": "3", "PORT": "1234"}

    def started() -> subprocess.Popen[bytes]:
        return subprocess.Popen([EACH_GPU, *command], cwd=tmp_path, env=environment)

    process = started()
    for _ in range(200):
        if len(list(tmp_path.glob("started-*"))) == 3:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    flags = "--distributed.coordinator localhost:1234 --distributed.num-processes 3 --distributed.process-id"
    for number in range(3):
        assert (tmp_path / f"started-{number}").read_text() == f"{number} train demo {flags} {number}\n"
    (tmp_path / "code").write_text("2")
    assert started().wait(20) == 2
    done = subprocess.run([EACH_GPU, "true"], env=os.environ | {"GPUS": "no"}, capture_output=True, text=True)
    assert done.returncode == 2 and "GPUS=no; valid: 1 or more" in done.stderr


def test_container_file() -> None:
    """It copies what there is, and all that an installation needs; its extra is one of ours."""
    text = (ROOT / "deploy" / "Containerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*)", text, re.MULTILINE) for word in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {"pyproject.toml", "constraints.txt", "megajax", "exact/jaxequal", "configs"}
    needed |= {project["readme"], *project["license-files"]}
    assert needed <= set(copied)
    assert set(re.findall(r"'\.\[(\w+)\]'", text)) == {"cuda13"} <= project["optional-dependencies"].keys()
