"""The loss of a configuration, if it is not the model's own.

Letters: B rows, T tokens.
"""

from dataclasses import replace

from jax import Array

from megajax.core.config import LOSSES, METRICS, StepConfig
from megajax.core.errors import UserError
from megajax.core.models.own_loss import Batch, Logits, Loss
from megajax.core.models.preferences import preference_loss


def loss_of(config: StepConfig) -> Loss | None:
    """The loss of a configuration, with its metrics; None: the model's own, alone. Raises `UserError` for a loss of the
    user's that has the name of the model's: evaluation would report a perplexity of it."""
    name, loss = config.train.loss, config.own_loss
    if loss is None and name == "preferences":
        loss = preference_loss(config.train.dpo_beta)
    elif loss is None and (named := LOSSES[name]):
        loss = replace(named if isinstance(named, Loss) else Loss(named), title=name)
    if loss and loss.name == next_token.__name__:
        raise UserError(f"loss {loss.name} is called like a language model's own; valid: another name or title")
    metrics = {name: METRICS[name] for name in config.train.metrics}
    if not metrics:
        return loss
    return (loss or Loss(next_token)).with_metrics(metrics)


def next_token(logits: Logits, batch: Batch) -> Array:
    """A language model's own loss."""
    return logits.cross_entropy(batch["targets"])
