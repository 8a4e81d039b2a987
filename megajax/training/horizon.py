"""When training ends and its learning rate has fallen, if that is not given in steps."""

import dataclasses
import math
from fractions import Fraction
from typing import Any

from megajax.config import Config
from megajax.optim.checks import check_cooldown


def in_steps(config: Config, samples: Any, began_with: int = 0) -> Config:
    """The configuration with `train.steps`, decay and warm-up of the learning rate all in steps.

    Args:
        config: the run's.
        samples: training samples, an epoch of which has each once.
        began_with: the `optimizer.decay_steps` that a resumed run keeps unless another is given; 0 for a new run.
    """
    train, end = config.train, 0
    if train.epochs:
        end = max(1, train.batch_sizes.steps(math.ceil(Fraction(str(train.epochs)) * samples.epoch_size)))
        config = dataclasses.replace(config, train=dataclasses.replace(train, steps=min(train.steps or end, end)))
    config = config.with_decay(began_with or end)
    optimizer = config.optimizer
    if optimizer.warmup_fraction:
        warmup = round(optimizer.warmup_fraction * optimizer.decay_steps)
        optimizer = dataclasses.replace(optimizer, warmup_steps=warmup)
    check_cooldown(optimizer)
    return dataclasses.replace(config, optimizer=optimizer)


def past_decay(config: Config) -> str:
    """A warning if training goes on after the learning rate has reached its floor; else empty."""
    optimizer, steps = config.optimizer, config.train.steps
    if not optimizer.ends_decay or steps <= optimizer.decay_steps:
        return ""
    nothing = ", and nothing is learned" if optimizer.min_learning_rate == 0 else ""
    return (
        f"warning: --train.steps {steps} is past --optimizer.decay-steps {optimizer.decay_steps}: from there on the "
        f"learning rate stays at its floor, --optimizer.min-learning-rate {optimizer.min_learning_rate:g}{nothing}"
    )
