"""When training ends, where that is given in epochs."""

import dataclasses
import math
from fractions import Fraction
from typing import Any

from megajax.config import Config
from megajax.validation import check_cooldown


def in_steps(config: Config, samples: Any) -> Config:
    """The configuration with `train.steps`, and the decay and the warm-up of the learning rate, in steps; `samples` are
    those that are trained on (`EpochSamples`), of which an epoch has each once.

    Raises:
        UserError: the decay of `wsd` does not fit in them.
    """
    train, optimizer = config.train, config.optimizer
    if train.epochs:
        end = max(1, train.batch_sizes.steps(math.ceil(Fraction(str(train.epochs)) * samples.epoch_size)))
        optimizer = dataclasses.replace(optimizer, decay_steps=optimizer.decay_steps or end)
        train = dataclasses.replace(train, steps=min(train.steps or end, end))
    if optimizer.warmup_fraction:
        warmup = round(optimizer.warmup_fraction * (optimizer.decay_steps or train.steps))
        optimizer = dataclasses.replace(optimizer, warmup_steps=warmup)
    check_cooldown(optimizer)
    return dataclasses.replace(config, train=train, optimizer=optimizer)
