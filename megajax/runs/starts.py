"""The configurations of a run's starts: `starts/STEP.toml` in its directory, by the step that each continued after. Of
starts that differ in nothing only the first is kept."""

from dataclasses import dataclass
from pathlib import Path

import jax

from megajax.core.options import counted
from megajax.host import reading
from megajax.host.files import write_atomically
from megajax.settings.plugins import Unproven
from megajax.settings.presets import Preset, read_preset

FOLDER = "starts"
_ON, _GIVEN = "# computed on: ", "; data of Python code"  # in the first line of a file


@dataclass(frozen=True)
class Start:
    """One of them."""

    step: int  # number of steps before it
    preset: Preset
    machine: str  # see `this_machine`; empty if it is not known
    given: bool  # whether its data were given by Python code


def this_machine() -> str:
    """What the bits of a run depend on besides its configuration."""
    kind, processes = jax.devices()[0].device_kind, counted(jax.process_count(), "process")
    return f"{kind}, JAX {jax.__version__}, {processes}"


def keep_start(run_dir: Path, step: int, text: str, given: bool) -> None:
    """Keep the `text` of config.toml of a start that continues after `step`, in place of starts after that, and whether
    its data were `given` by Python code. The config.toml that is there is of the start before."""
    kept, before = _files(run_dir), run_dir / "config.toml"
    earlier = [file for each, file in kept.items() if each < step]
    if step and not earlier and reading.kind(before):  # of an earlier version of megajax
        earlier = [run_dir / FOLDER / "0.toml"]
        write_atomically(earlier[0], reading.read_bytes(before))
    text = f"{_ON}{this_machine()}{_GIVEN * given}\n{text}"
    differs = not earlier or reading.read_bytes(earlier[-1]) != text.encode()
    if differs:
        write_atomically(run_dir / FOLDER / f"{step}.toml", text)
    for file in [file for each, file in kept.items() if each >= step + differs]:
        file.unlink()


def starts(run_dir: Path) -> list[Start]:
    """A run's starts in order; of one that kept none, its config.toml, as if all steps had been trained with it."""
    config, found = run_dir / "config.toml", []
    for step, file in (_files(run_dir) or {0: config}).items():
        preset, first = read_preset(file, in_run=True), reading.read_text(file).partition("\n")[0]
        if isinstance(plugins := preset.values.get("plugins"), Unproven):
            plugins.place = str(config)  # whose record has them
        machine = first.removeprefix(_ON) if first.startswith(_ON) else ""
        found.append(Start(step, preset, machine.removesuffix(_GIVEN), machine.endswith(_GIVEN)))
    return found


def _files(run_dir: Path) -> dict[int, Path]:
    """By step, ascending."""
    steps = (name.removesuffix(".toml") for name in reading.names(run_dir / FOLDER) if name.endswith(".toml"))
    return {step: run_dir / FOLDER / f"{step}.toml" for step in sorted(int(step) for step in steps if step.isdecimal())}
