"""Skipped steps: every device left them out, because loss or gradients could not be used."""

import math
from collections.abc import Mapping

from megajax.config import Config


class SkippedSteps:
    """Counts them."""

    def __init__(self, config: Config, before: int):
        """`before` is how many the run had before this start."""
        self._config, self.total, self._in_row = config, before, 0

    @property
    def too_many(self) -> bool:
        """Whether more than `optimizer.max_skipped` steps in a row were skipped."""
        return self._in_row > self._config.optimizer.max_skipped

    def count(self, step: int, metrics: Mapping[str, float]) -> str:
        """Note a step; returns why it was skipped, empty if it was not."""
        if not metrics["skipped"]:
            self._in_row = 0
            return ""
        self.total, self._in_row = self.total + 1, self._in_row + 1
        reason = f"step {step}: the loss is {metrics['loss']:.6g}, the gradient norm {metrics['grad_norm']:.6g}"
        optimizer = self._config.optimizer
        if self.too_many:
            in_row = f"{self._in_row} steps in a row could not be used"
            return f"{reason}: {in_row} (--optimizer.max-skipped {optimizer.max_skipped})"
        if self._config.precision == "fp16":
            reason += f" with loss scale {metrics['loss_scale']:g}"
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            reason += f", far above the recent ones (--optimizer.skip-above {optimizer.skip_above:g})"
        return reason
