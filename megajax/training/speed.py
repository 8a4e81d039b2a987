"""The figures of a step beside its loss: the model's arithmetic per second, its share of the device's peak, and the
memory in use."""

from collections.abc import Iterable
from typing import Any

import jax

from megajax.config import Config
from megajax.models.family import step_flops
from megajax.plan.machines import peak_of_device


class Speed:
    """What the devices of a run compute its steps with.

    Attributes:
        flops: of a sequence, forward and backward, as `models/family.step_flops` counts.
        devices: among which a step's sequences are divided.
        peak: FLOP/s of one of them in the run's precision; None if it is not known.
    """

    def __init__(self, config: Config):
        self.flops, self.devices = step_flops(config.model, 1), config.mesh.num_devices
        self.peak = peak_of_device(jax.devices()[0].device_kind, config.precision)

    def figures(self, sequences: int, seconds: float) -> dict[str, float]:
        """Of a step over so many sequences, by the names they are logged under."""
        rate = self.flops * sequences / self.devices / max(seconds, 1e-9)
        share = {} if self.peak is None else {"mfu": rate / self.peak}
        return {"tflops_per_device": rate / 1e12, **share, **memory_figures(jax.local_devices())}


def memory_figures(devices: Iterable[Any]) -> dict[str, int]:
    """Bytes in use now and at most so far, each on the device that has most, by the names they are logged under; empty
    where the devices do not say it, as CPUs."""
    stats = [found for device in devices if (found := device.memory_stats())]
    names = {"memory_bytes": "bytes_in_use", "peak_memory_bytes": "peak_bytes_in_use"}
    found = {name: [each[key] for each in stats if key in each] for name, key in names.items()}
    return {name: max(sizes) for name, sizes in found.items() if sizes}
