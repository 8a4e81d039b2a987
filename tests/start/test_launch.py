"""XLA's flags: set before JAX starts, unless the user set them; known faults of the toolchain, tried under them.

On jaxlib 0.10.2 the last test fails with XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=+reduce, which takes the
remedy away.
"""

import dataclasses
import os
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest import mock

import jax
import pytest
from tiny import full, tiny_config

from megajax.core.errors import UserError
from megajax.start import launch

CUDA = "jax_cuda13_plugin"


@pytest.fixture
def plugin(monkeypatch):
    """JAX's CUDA plugin seems to be installed."""
    found = lambda name: ModuleSpec(name, None) if name == CUDA else None  # noqa: E731
    monkeypatch.setattr(launch.importlib.util, "find_spec", found)


@pytest.fixture
def environment(monkeypatch):
    """No flags; what is set here is undone."""
    for name in ("XLA_FLAGS", "JAX_PLATFORMS", launch.GPU_MEMORY[0], "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setitem(os.environ, name, "")
        monkeypatch.delitem(os.environ, name)
    return monkeypatch


def start(**settings) -> list[str]:
    launch.start(dataclasses.replace(tiny_config(), **settings))
    return os.environ["XLA_FLAGS"].split()


def test_on_gpus_the_flags_of_the_documentation_are_set(environment, plugin):
    flags = start()
    expected = {f"{name}={value}" for name, value in launch.GPU_FLAGS.items()}
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    assert expected <= set(flags) and all(f"`{flag}`" in page for flag in expected)
    assert f"`{'='.join(launch.GPU_MEMORY)}`" in page
    assert launch.gpu_flags() == [flag for flag in flags if "gpu" in flag]
    assert os.environ[launch.GPU_MEMORY[0]] == launch.GPU_MEMORY[1]
    assert "--xla_gpu_enable_command_buffer=" not in flags
    assert "--xla_gpu_enable_command_buffer=" in start(profile="2:3")


def test_what_the_user_has_set_stays(environment, plugin):
    name = next(iter(launch.GPU_FLAGS))
    environment.setenv("XLA_FLAGS", f"{name}=false --xla_gpu_autotune_level=2")
    environment.setenv(launch.GPU_MEMORY[0], "0.5")
    flags = start()
    assert [flag for flag in flags if flag.startswith(f"{name}=")] == [f"{name}=false"]
    assert "--xla_gpu_autotune_level=2" in flags and os.environ[launch.GPU_MEMORY[0]] == "0.5"
    assert len(launch.gpu_flags()) == len(launch.GPU_FLAGS) + 1


@pytest.mark.parametrize(
    ("version", "faulty"),
    [("0.10.1", False), ("0.10.2", True), ("0.11.0.dev20260701", True), ("0.11.2", False), ("0.12.0.1", False)],
)
def test_faulty_versions_of_jaxlib_get_what_avoids_the_fault(environment, version, faulty):
    environment.setattr(launch.importlib.metadata, "version", lambda name: version)
    assert launch.reductions_are_faulty() == faulty
    launch.avoid_known_faults()
    assert not launch.reductions_are_faulty()
    assert ("ynn" in os.environ.get("XLA_FLAGS", "")) == faulty  # other versions may not know the flag


@pytest.mark.parametrize(
    ("value", "warns"),
    [("+reduce", True), ("+individual_dot", True), ("reduce", True), ("-reduce", False), ("dot", False), ("", False)],
)
def test_a_start_with_the_fault_says_so_in_one_line(environment, capfd, value, warns):
    environment.setattr(launch.importlib.metadata, "version", lambda name: "0.10.2")
    environment.setenv("XLA_FLAGS", f"--xla_cpu_experimental_ynn_fusion_type={value}")
    start()
    said = [line for line in capfd.readouterr().err.splitlines() if "jax#39103" in line]
    assert len(said) == warns


def test_what_makes_xla_repeat_work_is_said(environment, capfd):
    """Once, whether the environment or a program set it."""
    launch._warn_of_optimization.cache_clear()
    jax.config.update("jax_optimization_level", "O1")
    try:
        start(), start()
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")
    assert capfd.readouterr().err.count("warning: JAX_OPTIMIZATION_LEVEL=O1: on GPUs steps") == 1


@pytest.mark.parametrize(("platforms", "expected"), [("", True), ("cuda,cpu", True), ("gpu", True), ("cpu", False)])
def test_gpus_may_be_ruled_out(environment, plugin, platforms, expected):
    assert launch.may_use_gpus({"JAX_PLATFORMS": platforms}) == expected


@pytest.mark.parametrize(
    ("count", "simulated", "variables"),
    [
        (1, 0, {"JAX_PLATFORMS": "cpu"}),
        (8, 8, {}),
        (0, 0, {}),  # GPUs, whose number only JAX knows
        (0, 0, {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}),
        (0, 0, {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}),
        (0, 8, {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}),
    ],
)
def test_devices_that_are_known_before_jax_is_imported(environment, plugin, count, simulated, variables):
    environment.delitem(sys.modules, "jax")
    for name, value in variables.items():
        environment.setenv(name, value)
    assert launch.known_devices(simulated) == count and "jax" not in sys.modules


def test_the_old_name_of_the_memory_s_share_stays_alone(environment, plugin):
    """JAX refuses both names together."""
    environment.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    start()
    assert launch.GPU_MEMORY[0] not in os.environ


def test_without_the_plugin_there_are_none(environment):
    environment.setattr(launch.importlib.util, "find_spec", lambda name: None)
    assert not launch.may_use_gpus({}) and not launch.gpu_flags()
    assert not any("gpu" in flag for flag in start())


@pytest.mark.parametrize("number", [full(0), 1])
def test_processes_that_do_not_find_each_other_say_so(number: int) -> None:
    """In one line, where JAX would abort the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    code = f"""
from megajax.start import joining, launch
from megajax.settings.flags import parse
joining.START_PATIENCE, joining.SAID_AFTER = 1.0, 0.5
cluster = ["--distributed.coordinator", {coordinator!r}, "--distributed.num-processes=2"]
launch.start(parse(["demo", *cluster, "--distributed.process-id={number}"], "", ""))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    valid = "valid: an address that all processes can reach, and exactly the announced number of processes"
    where = f"--distributed.coordinator {coordinator}: "
    said, found = "waiting for the other processes, at most 1 s", "the processes did not find each other within 1 s"
    assert (done.returncode, done.stderr) == (1, f"{where}{said}\nerror: {where}{found}; {valid}\n")


@pytest.mark.slow
def test_processes_that_have_found_each_other_start_again() -> None:
    """As `megajax.init` does; another number of processes, or JAX used before, says so."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    code = f"""
import sys
from megajax.core.errors import UserError
from megajax.start import launch
from megajax.settings.flags import parse
def start(count):
    cluster = ["--distributed.coordinator", {coordinator!r}, f"--distributed.num-processes={{count}}"]
    launch.start(parse(["demo", *cluster, "--distributed.process-id=" + sys.argv[1]], ""))
for count in 2, 2, 3:
    try:
        start(count)
    except UserError as error:
        print(error)
"""
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True) for number in range(2)]
    line = "--distributed.num-processes 3: this process is already one of 2; valid: that number\n"
    assert [each.communicate(timeout=100)[0] for each in both] == [line, line]
    early = code.replace("for count", "import jax; jax.devices()\nfor count")
    done = subprocess.run([sys.executable, "-c", early, "0"], capture_output=True, text=True, timeout=100)
    assert "JAX was used before in this process; valid: " in done.stdout


def test_platforms_that_are_not_here(environment):
    """JAX has no words for a plugin that is not installed."""
    environment.setattr("jax.devices", mock.Mock(side_effect=AssertionError))
    environment.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(UserError, match=r"^JAX_PLATFORMS=cuda: JAX finds no devices: no such plugin; valid: "):
        start()


CANARIES = """
from megajax.settings.flags import parse
from megajax.start.launch import start

start(parse(["demo", "--precision", "fp64"], "", ""))

import jax
import jax.numpy as jnp


def squares(dtype, rows):  # jax#39103: wrong sums
    x = jnp.stack([jnp.arange(rows, dtype=dtype)] + 2 * [jnp.zeros(rows, dtype)], axis=1)
    return jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3, dtype=dtype) @ row) ** 2)))(x)[-1]


def high_rank():  # jax#39257: a hang or a crash
    x, y = jnp.ones((10, 4, 6), jnp.float32), jnp.ones((10, 4, 6, 9, 9, 9, 9, 9), jnp.float32)
    return jnp.max(jax.jit(lambda x, y: jnp.log(jnp.sum(x[..., *5 * [None]] * y, axis=2)))(x, y))


def dim_of_one():  # jax#40412: a crash
    x = jnp.ones((3, 1, 2, 2, 8, 8, 8), jnp.float32)
    return jnp.max(jax.jit(lambda x, y: jnp.sum(x * y, axis=3))(x, x))


print("fp64", squares(jnp.float64, 16_385) == 16_384**2, flush=True)
print("fp32", squares(jnp.float32, 32_769) == 32_768**2, flush=True)
print("high rank", abs(high_rank() - 1.7917595) < 1e-6, flush=True)
print("dim of one", dim_of_one() == 2, flush=True)
"""


@pytest.mark.slow
def test_known_faults_of_jaxlib_do_not_show():
    """In a process of its own, since some of the faults end it, and with the optimisation that users get."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "ynn_fusion_type" in flag and "=-" not in flag]
    done = subprocess.run(
        [sys.executable, "-c", CANARIES],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)},
    )
    expected = ["fp64 True", "fp32 True", "high rank True", "dim of one True"]
    assert (done.stdout.splitlines(), done.returncode) == (expected, 0), done.stderr[-2000:]
