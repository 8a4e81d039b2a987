"""When training ends, where that is given in epochs."""

import dataclasses
import math
from typing import Any

from megajax.config import Config


def in_steps(config: Config, samples: Any) -> Config:
    """The configuration with `train.steps`, and the decay and the warm-up of the learning rate, in steps; `samples` are
    those that are trained on (`EpochSamples`), of which an epoch has each once."""
    train, optimizer = config.train, config.optimizer
    if train.epochs:
        end = max(1, math.ceil(train.epochs * samples.epoch_size / train.global_batch))
        optimizer = dataclasses.replace(optimizer, decay_steps=optimizer.decay_steps or end)
        train = dataclasses.replace(train, steps=min(train.steps or end, end))
    if optimizer.warmup_fraction:
        warmup = round(optimizer.warmup_fraction * (optimizer.decay_steps or train.steps))
        optimizer = dataclasses.replace(optimizer, warmup_steps=warmup)
    return dataclasses.replace(config, train=train, optimizer=optimizer)
