"""Figures of a step beside its loss: the model's FLOP/s, their share of the device's peak, memory in use."""

from collections.abc import Iterable
from typing import Any

import jax

from megajax.config import Config
from megajax.models.family import step_flops
from megajax.plan.machines import peak_of_device


class Speed:
    """The arithmetic of a sequence, and the devices that compute it."""

    def __init__(self, config: Config):
        self.flops = step_flops(config.model, 1)  # of a sequence, forward and backward
        self.devices = config.mesh.num_devices
        self.peak = peak_of_device(jax.devices()[0].device_kind, config.precision)  # FLOP/s, None if it is unknown

    def figures(self, sequences: int, seconds: float) -> dict[str, float]:
        """Figures of a step over so many sequences, by their names in metrics.jsonl."""
        rate = self.flops * sequences / self.devices / max(seconds, 1e-9)
        share = {} if self.peak is None else {"mfu": rate / self.peak}
        return {"tflops_per_device": rate / 1e12, **share, **memory_figures(jax.local_devices())}


def memory_figures(devices: Iterable[Any]) -> dict[str, int]:
    """Bytes in use now and at their peak, each on the fullest device, by their names in metrics.jsonl; empty on CPUs,
    which do not report them."""
    stats = [found for device in devices if (found := device.memory_stats())]
    names = {"memory_bytes": "bytes_in_use", "peak_memory_bytes": "peak_bytes_in_use"}
    found = {name: [each[key] for each in stats if key in each] for name, key in names.items()}
    return {name: max(sizes) for name, sizes in found.items() if sizes}
