"""Checks of optimizer options that depend on each other."""

from megajax.errors import UserError
from megajax.optim.config import OptimizerConfig
from megajax.options import MOST


def check_cooldown(optimizer: OptimizerConfig) -> None:
    """Check that `wsd`, and no other schedule, has cooldown steps, which fit between warm-up and decay."""
    given = f"--optimizer.cooldown-steps {optimizer.cooldown_steps}"
    if optimizer.schedule != "wsd":
        if optimizer.cooldown_steps:
            raise UserError(
                f"{given} with --optimizer.schedule {optimizer.schedule}; valid: --optimizer.schedule wsd, or 0"
            )
        return
    end = optimizer.decay_steps
    warmup = optimizer.warmup_steps or round(optimizer.warmup_fraction * end)
    most = max(1, end - warmup) if end else MOST
    if not 1 <= optimizer.cooldown_steps <= most:
        why = f", which ends at --optimizer.decay-steps {end} after {warmup} steps of warm-up" if end else ""
        raise UserError(f"{given} with --optimizer.schedule wsd{why}; valid: 1 to {most}")
