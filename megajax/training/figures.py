"""Figures of a step besides its loss: FLOP/s, MFU, memory in use; and steps that every device skipped because the loss
or the gradients were unusable."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from megajax.core.models.flops import step_flops
from megajax.core.precision import BESIDE
from megajax.plan.machines import peak_of_device
from megajax.settings.config import Config

MOST_SKIPPED = 20  # steps in a row


class Speed:
    """The FLOPs of a sequence, and the devices that compute it."""

    def __init__(self, config: Config):
        self.flops = step_flops(config.model, 1)  # per sequence, forward and backward
        self.devices = config.mesh.num_devices
        # FLOP/s, None if unknown; for fp8 bf16's, which attention and some products compute in.
        self.peak = peak_of_device(jax.devices()[0].device_kind, BESIDE.get(config.precision, config.precision))

    def figures(self, sequences: int, seconds: float) -> dict[str, float]:
        """Figures of a step over `sequences` sequences, by their names in metrics.jsonl."""
        rate = self.flops * sequences / self.devices / max(seconds, 1e-9)
        share = {} if self.peak is None else {"mfu": rate / self.peak}
        return {"tflops_per_device": rate / 1e12, **share, **memory_figures(jax.local_devices())}


def in_words(name: str, value: float, *, percent: bool = False) -> str:
    """A measure of a validation or a task with its name; `percent` says that accuracies are already in percent."""
    if "accuracy" in name:
        return f"{name} {value if percent else 100 * value:.2f}%"
    return f"{name} {value:{',' if isinstance(value, int) else '.4f' if abs(value) < 10 else '.2f'}}"


def memory_figures(devices: Iterable[Any]) -> dict[str, int]:
    """Current and peak memory use of the fullest device in bytes, by their names in metrics.jsonl; empty on CPUs."""
    stats = [figures for device in devices if (figures := device.memory_stats())]
    names = {"memory_bytes": "bytes_in_use", "peak_memory_bytes": "peak_bytes_in_use"}
    by_name = {name: [each[key] for each in stats if key in each] for name, key in names.items()}
    return {name: max(sizes) for name, sizes in by_name.items() if sizes}


def memory_in_use(devices: list[jax.Device]) -> str | None:
    """The peak memory of the fullest device; None on CPUs, which do not report it."""
    used = memory_figures(devices).get("peak_memory_bytes")
    if used is None:
        return None
    limits = [stats["bytes_limit"] for device in devices if "bytes_limit" in (stats := device.memory_stats() or {})]
    of = f" of {min(limits) / 2**20:,.1f}" if limits else ""
    return f"memory: {used / 2**20:,.1f} MiB{of} peak use on this process's devices"


class SkippedSteps:
    """Counts a run's skipped steps; `before` were skipped in earlier starts."""

    def __init__(self, config: Config, before: int):
        self._config, self.total, self._in_row = config, before, 0

    @property
    def too_many(self) -> bool:
        """Whether more than `MOST_SKIPPED` steps in a row were skipped."""
        return self._in_row > MOST_SKIPPED

    def count(self, step: int, metrics: Mapping[str, float]) -> str:
        """Count a step; returns why it was skipped, or an empty string if it was not."""
        if not metrics["skipped"]:
            self._in_row = 0
            return ""
        self.total, self._in_row = self.total + 1, self._in_row + 1
        reason = f"step {step}: the loss is {metrics['loss']:.6g}, the gradient norm {metrics['grad_norm']:.6g}"
        if self.too_many:
            return f"{reason}: {self._in_row} steps in a row were skipped"
        if self._config.precision == "fp16":
            reason += f" with loss scale {metrics['loss_scale']:g}"
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            reason += f", far above recent ones (--optimizer.skip-above {self._config.optimizer.skip_above:g})"
        return reason
