"""Direct preference optimization (Rafailov et al., arXiv 2305.18290): of two answers to a prompt, the chosen one shall
gain on the other, compared with what a reference model thinks of both.

A row of a batch (`preferences_form`) holds both answers, each after the prompt, as two documents that do not attend to
each other. Letters: B rows, T tokens.
"""

import jax
from jax import Array

from megajax.core.batch import preferences_form
from megajax.core.models.own_loss import Batch, Logits, Loss

_ARRAYS = tuple((name, preferences_form().entries[name]) for name in ("answer", "reference"))


def advantage(logits: Logits, batch: Batch) -> Array:
    """The log-probability of the chosen answer less that of the other, [B]."""
    log_p_BT = logits.log_probabilities(batch["targets"])
    return logits.sum_over_tokens(log_p_BT * batch["answer"].astype(log_p_BT.dtype))


def preference_loss(beta: float) -> Loss:
    """-log sigmoid of beta times what the advantage has gained on the reference's; how often that is positive; and what
    it is on average."""

    def preferences(logits: Logits, batch: Batch) -> dict[str, Array]:
        margin_B = beta * (advantage(logits, batch) - batch["reference"])
        accuracy_B = (margin_B > 0).astype(margin_B.dtype)
        return {"loss": -jax.nn.log_sigmoid(margin_B), "accuracy": accuracy_B, "margin": margin_B}

    return Loss(preferences, per="row", measures=("accuracy", "margin"), arrays=_ARRAYS)


REFERENCE = Loss(advantage, per="row", arrays=_ARRAYS)
"""Its scores are those of the reference; it is not minimized."""
