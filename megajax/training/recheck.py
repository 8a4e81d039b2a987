"""What `--train.recheck` finds, with the names of devices."""

import jax
import numpy as np

from megajax.core.program.program import Program
from megajax.core.program.recheck import COMPARED, compares_gradients
from megajax.core.program.state import TrainState
from megajax.core.program.train_step import checksums_of_state
from megajax.host.processes import host_names
from megajax.settings.config import Config
from megajax.start.selftest import located, selftest


def recheck_line(config: Config, program: Program) -> str:
    """What is compared, and how often; empty if nothing is."""
    what = "gradients and losses" if compares_gradients(program) else "losses alone (gradients need --deterministic)"
    line = f"recheck: {what} of every replica, and copies of its state, every {config.train.recheck} steps"
    return line * bool(config.train.recheck)


class Rechecks:
    """All processes call its methods together."""

    def __init__(self, config: Config, program: Program):
        self._program, self._every = program, config.train.recheck
        self._devices = program.mesh.devices.reshape(config.mesh.data, -1)
        self._hosts = host_names() if self._every else []

    def checksums(self, step: int, state: TrainState) -> tuple[jax.Array, ...]:
        """Those of the state before a step that is rechecked; none before another one."""
        return (checksums_of_state(self._program)(state),) if self._every and step % self._every == 0 else ()

    def judged(self, step: int, differing: jax.Array) -> tuple[int, str]:
        """How many devices differ in a step, and a line that names them; empty if none does."""
        wrong = np.asarray(differing).reshape(len(COMPARED), *self._devices.shape)
        found = [f"{what}: {self._named(places)}" for what, places in zip(COMPARED, wrong, strict=True) if places.any()]
        line = f"step {step}: --train.recheck found different bits in {'; '.join(found)}" if found else ""
        return int(wrong.any(axis=0).sum()), line

    def _named(self, places: np.ndarray) -> str:
        """The replicas and devices at places of the mesh, [data, rest]."""
        replicas = {data: self._devices[data, places[data]].tolist() for data in np.flatnonzero(places.any(axis=1))}
        return " or ".join(f"data {data}, {located(devices, self._hosts)}" for data, devices in replicas.items())

    def narrowed(self, line: str) -> str:
        """The line with what the self-test says."""
        return f"{line}; the self-test finds {selftest(self._program) or 'no device that is always wrong'}"
