"""A loss of the user's in place of a language model's own: a function of logits and batch.

Letters: B rows, T this device's tokens of a sequence, K ids for each token, V this device's columns of the vocabulary.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.core.batch import IGNORED, BatchArray, BatchSpec
from megajax.core.errors import UserError, told
from megajax.core.models.context import Context
from megajax.core.models.family import Batch
from megajax.core.parallel import vocabulary
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.collectives import entry_axes, gather_shards, vary_as, varying_axes
from megajax.core.parallel.sites import named
from megajax.core.precision import at_least_fp32

_NAME = re.compile(r"(?!validation_)[^\W_][\w-]*")
_TAKEN = (  # names of a step's other figures
    "data_seconds expert_load grad_norm learning_rate loss loss_scale memory_bytes mfu next_token peak_memory_bytes "
    "resumed_from seconds skipped skipped_steps step tflops_per_device tokens tokens_per_second"
)


@dataclass(frozen=True, repr=False)
class Logits:
    """The logits of next tokens, of which this device has some columns, and with context parallelism some tokens. What
    the methods return is the same on all devices that share the columns, and can be differentiated.

    Attributes:
        columns_BTV: this device's columns; ids from `vocab_size` up are padding, with the lowest number.
    """

    columns_BTV: Array
    vocab_size: int
    boundary: RegionBoundary

    def __repr__(self) -> str:
        return f"Logits(of {self.vocab_size} ids)"

    def cross_entropy(self, ids_BT: Array) -> Array:
        """The negative log-probability of an id for every token, [B, T], in at least fp32; 0 where it is none of the
        vocabulary, such as -1."""
        return vocabulary.cross_entropy(self.columns_BTV, self._known(ids_BT), self.boundary.vocabulary)

    def log_probabilities(self, ids: Array) -> Array:
        """The log-probability of an id for every token, [B, T], or of several, [B, T, K]; 0 where an id is none of the
        vocabulary, such as -1."""
        if ids.ndim == 2:
            return -self.cross_entropy(ids)
        return vocabulary.log_probabilities(self.columns_BTV, self._known(ids), self.boundary.vocabulary)

    def _known(self, ids: Array) -> Array:
        """The ids, -1 where they are none of the vocabulary; such ones are refused if their values are known."""
        if not isinstance(ids, jax.core.Tracer) and (most := int(np.max(ids))) >= self.vocab_size:
            raise UserError(f"an id {most} in a loss; valid: up to {self.vocab_size - 1}, or -1")
        return jnp.where((ids >= 0) & (ids < self.vocab_size), ids, IGNORED)

    def entropy(self) -> Array:
        """The entropy of every token's distribution in nats, [B, T], in at least fp32."""
        return vocabulary.entropy(self.columns_BTV, self.vocab_size, self.boundary.vocabulary)

    def logsumexp(self) -> Array:
        """The logarithm of the sum of every token's exponentials, [B, T], in at least fp32."""
        return vocabulary.log_sum_exp(self.columns_BTV, self.boundary.vocabulary)

    def whole(self) -> Array:
        """All columns, [B, T, V], in at least fp32, gathered on every device."""
        axes = entry_axes(self.boundary.vocabulary)
        whole_BTV = gather_shards(self.columns_BTV, -1, axes, invariant=True)[..., : self.vocab_size]
        return whole_BTV.astype(at_least_fp32(whole_BTV.dtype))

    def at_temperature(self, temperature: float) -> "Logits":
        """The logits divided by a temperature."""
        return dataclasses.replace(self, columns_BTV=self.columns_BTV / temperature)

    def sum_over_tokens(self, x_BT: Array) -> Array:
        """The sum over the tokens of every row, [B], whichever devices have them."""
        return self.boundary.sum_over_context(jnp.sum(x_BT, axis=1))


@dataclass(frozen=True)
class Loss:
    """What training minimizes in place of the mean cross-entropy of next tokens.

    Attributes:
        function: (logits, batch) -> the loss of every token, [B, T], or of every row, [B]; or a dict with it as `loss`,
            and `measures`. Arrays of the batch with an entry for each token have those of this device's tokens.
            Training minimizes the mean over all targets of the global batch that are not -1, or over its rows with one.
        per: whether these are losses of tokens or of rows.
        measures: names of what else the function returns, whose means are reported.
        arrays: the arrays that a batch has besides `tokens` and `targets`, by name.
        sizes: of dims of these other than `tokens`.
        title: its name among metrics; by default the function's.
    """

    function: Callable[[Logits, Batch], Array | Mapping[str, Array]]
    per: Literal["token", "row"] = "token"
    measures: Sequence[str] = ()
    arrays: Mapping[str, BatchArray] | Sequence[tuple[str, BatchArray]] = ()
    sizes: Mapping[str, int] | Sequence[tuple[str, int]] = ()
    title: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.measures, str) or not isinstance(self.measures, Iterable):
            raise UserError(f"loss: measures {self.measures!r:.80}; valid: a tuple of names")
        for name in ("measures", "arrays", "sizes"):  # hashable, so that programs can be found by it
            given = getattr(self, name)
            object.__setattr__(self, name, tuple(given.items() if isinstance(given, Mapping) else given))
        if not callable(self.function):
            raise UserError(f"loss {self.function!r:.80}; valid: a function of logits and batch")
        if self.per not in ("token", "row"):
            raise UserError(f"loss: per {self.per!r}; valid: token, row")
        names = [*self.measures, self.name]
        for name in names:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                valid = "letters, digits, - and _, beginning with a letter or digit, and not with validation_"
                raise UserError(f"loss: name {name!r:.80}; valid: {valid}")
            if names.count(name) > 1 or name in set(self.measures).intersection(_TAKEN.split()):
                raise UserError(f"loss {self.name}: two figures called {name}; valid: another name for the measure")

    @property
    def name(self) -> str:
        """What the loss is called among metrics."""
        return self.title or getattr(self.function, "__name__", "").strip("<>_") or "own"

    def with_metrics(self, metrics: Mapping[str, Callable[[Logits, Batch], Array]]) -> "Loss":
        """The same loss, reporting the means of further functions."""

        def both(logits: Logits, batch: Batch) -> dict[str, Array]:
            found = self.function(logits, batch)
            found = dict(found) if isinstance(found, Mapping) else {"loss": found}
            return found | {name: jax.lax.stop_gradient(of(logits, batch)) for name, of in metrics.items()}

        return dataclasses.replace(self, function=wraps(self.function)(both), measures=(*self.measures, *metrics))

    def form(self, form: BatchSpec) -> BatchSpec:
        """What a batch of text holds with this loss."""
        return dataclasses.replace(
            form,
            entries={**form.entries, **dict(self.arrays)},
            targets={self.name: "targets"},
            measures=dict.fromkeys(self.measures, "targets"),
            sizes={**form.sizes, **{dim: partial(_constant, size) for dim, size in dict(self.sizes).items()}},
            by_row=self.per == "row",
        )

    def counted(self, batch: Batch, boundary: RegionBoundary) -> Array:
        """Which of this device's tokens, or of its rows, count."""
        if self.per == "row":
            return jnp.any(batch["targets"] != IGNORED, axis=1)
        return boundary.context_tokens(batch["targets"]) != IGNORED

    def values(self, logits: Logits, batch: Batch, form: BatchSpec) -> dict[str, Array]:
        """The losses and measures of every token or row that counts, 0 for the others."""
        shared, whole = logits.boundary, batch
        if missing := dict(self.arrays).keys() - batch.keys():
            raise UserError(
                f"loss {self.name}: a batch without {', '.join(sorted(missing))}; valid: batches or data with them"
            )
        batch = {
            name: shared.context_tokens(array) if form.entries[name].dims[:1] == ("tokens",) else array
            for name, array in whole.items()
        }
        methods = "cross_entropy, log_probabilities, entropy, logsumexp, …, or whole() for an array"
        valid = f"a function of logits, which has {methods}, and of a batch with {', '.join(sorted(batch))}"
        with told(f"loss {self.name}", valid):
            found = self.function(logits, batch)
            found = found if isinstance(found, Mapping) else {"loss": found}
        if found.keys() != {"loss", *self.measures}:
            valid, names = ", ".join(["loss", *self.measures]), [str(name) for name in found if name != "loss"]
            more = f", or megajax.Loss(…, measures={(*names,)})" * ("loss" in found and not self.measures)
            raise UserError(
                f"loss {self.name} returned {', '.join(map(str, found)) or 'nothing'}; valid: {valid}{more}"
            )
        counts = self.counted(whole, shared)
        split = {*entry_axes(shared.vocabulary)}
        for name, x in found.items():
            what = f"loss {self.name}: {name}" if name != "loss" else f"loss {self.name}"
            self._check(what, x, counts.shape, differentiated=name == "loss")
            if varying_axes(x) & split:
                valid = "cross_entropy, log_probabilities, entropy or whole of the logits"
                raise UserError(f"{what} was computed from this device's columns alone; valid: {valid}")
        found = {name: jnp.where(counts, x, jnp.zeros((), x.dtype)) for name, x in found.items()}
        found = found if self.per == "token" else {name: shared.once(x) for name, x in found.items()}
        return {self.name if name == "loss" else name: x for name, x in found.items()}

    def _check(self, what: str, x: Any, shape: tuple[int, ...], *, differentiated: bool) -> None:
        valid = f"[B], here {[*shape]}, a number for every row"
        if self.per == "token":
            valid = f'[B, T], here {[*shape]}, a number for every token, or megajax.Loss(…, per="row")'
        if not isinstance(x, Array):
            raise UserError(f"{what} is {x!r:.80}; valid: {valid}")
        if x.shape != shape:
            raise UserError(f"{what} has the shape {[*x.shape]}; valid: {valid}")
        if differentiated and not jnp.issubdtype(x.dtype, jnp.floating):
            raise UserError(f"{what} is of the type {x.dtype}, which has no gradient; valid: floats")


@dataclass(frozen=True)
class WithLoss:
    """The ends of a language model, with a loss of the user's."""

    model: Any
    loss: Loss
    form: BatchSpec

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def losses(self, x_BTD: Array, batch: Batch, context: Context) -> dict[str, Array]:
        """See `FamilyModel`."""
        return {name: jnp.sum(named(x, "losses")) for name, x in self._values(x_BTD, batch).items()}

    def scores(self, x_BTD: Array, batch: Batch) -> dict[str, tuple[Array, Array]]:
        """See `FamilyModel`; those of the model's own loss as well, or alone if the batch lacks this one's arrays. What
        is right is what a measure `accuracy` says; if there is none, nothing is."""
        if not batch.keys() >= dict(self.loss.arrays).keys():
            return self.model.scores(x_BTD, batch)
        boundary, values = self.model.boundary, self._values(x_BTD, batch)
        counts = self.loss.counted(batch, boundary)
        right = values.get("accuracy", jnp.zeros(counts.shape)).astype(jnp.int32)
        right = jnp.where(counts, right, jnp.full_like(right, IGNORED))
        if self.loss.per == "row":
            right = boundary.once(right)
        else:
            values, right = jax.tree.map(boundary.in_places, (values, right))
        return self.model.scores(x_BTD, batch) | {name: (x, vary_as(right, x)) for name, x in values.items()}

    def _values(self, x_BTD: Array, batch: Batch) -> dict[str, Array]:
        boundary = self.model.boundary
        columns_BTV = named(self.model.logits(x_BTD), "logits", 2, axes=boundary.vocabulary)
        return self.loss.values(Logits(columns_BTV, self.model.vocab_size, boundary), batch, self.form)


def _constant(size: int, length: int) -> int:
    return size
