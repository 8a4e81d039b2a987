"""The theory of what a training step communicates: arithmetic on a configuration, in which nothing is read from a
program, to be compared with the traced step. For weights and between stages it is the plan's (`WeightTraffic`).

It has every collective of `core/program/train_step.py`, counted as `core/program/communication.py` counts the step's
jaxpr. The boundaries of regions are those in `core/parallel/boundary.py`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property

from megajax.core.backend import CPU, Backend
from megajax.core.batch import most_masked
from megajax.core.models.context_attention import copies
from megajax.core.models.family import family_of
from megajax.core.models.registry import FAMILIES
from megajax.core.parallel.collectives import CONTEXT, PIPE, TENSOR
from megajax.core.program.communication import Collective
from megajax.plan.communication import (
    EXCHANGE,
    GATHER,
    PERMUTE,
    REDUCE,
    SCATTER,
    Axes,
    Communication,
    WeightTraffic,
    one,
    total_sent,
    totals,
)
from megajax.plan.sizes import Occurrences, Sizes
from megajax.settings.config import Config
from megajax.verify.experts import ExpertTraffic
from megajax.verify.verdict import Finding

_WORD = 4  # bytes of a scale


def theory_of(config: Config, operand_item: int | None = None, backend: Backend = CPU) -> list[Communication]:
    """All that a training step of a valid configuration communicates, per device, in the order of the program. Its
    layers' products may have operands of other than the precision's bytes (`Sizes.operand_item`)."""
    step = _Step(config, operand_item, backend)
    weights = step.weights
    before = [*weights.targets(), *weights.scales(), *weights.p2p_transfers()]
    forward = [*step.embedding(), *step.layers(), *step.head()]
    backward = [*step.layers_backward(), *step.embedding_backward(), *step.weight_gradients()]
    return [*before, *forward, *backward, *weights.after_the_loop()]


def check_collectives(
    config: Config,
    found: Iterable[Collective],
    kind: str = "",
    operand_item: int | None = None,
    backend: Backend = CPU,
) -> Finding:
    """Compare the exact counts and bytes of all collectives of a step, by kind, axes and shape. `kind` says what the
    step computes in, if not only the precision; for the others see `theory_of`."""
    expected = theory_of(config, operand_item, backend)
    wanted, there = totals(expected), totals(found)
    wrong = [key for key in wanted.keys() | there.keys() if wanted[key] != there[key]]
    where = f"{sum(wanted.values())} collectives, {total_sent(config, expected):,} bytes sent by a device"
    if wrong:
        words = [_difference(key, wanted, there, expected) for key in sorted(wrong, key=str)]
        where = "; ".join(words[:3]) + (f"; and {len(words) - 3} more" if len(words) > 3 else "")
    return Finding(f"{kind or config.precision} communication against theory", len(wrong), 0, where)


def _difference(key: tuple, wanted: Counter, there: Counter, expected: list[Communication]) -> str:
    kind, axes, shape, num_bytes = key
    purposes = {each.purpose for each in expected if (each.kind, each.axes) == (kind, axes) and shape in each.shapes}
    of = f" ({', '.join(sorted(purposes))})" if purposes else ""
    return (
        f"{there[key]} instead of {wanted[key]} {kind} over {' x '.join(axes)} of {list(shape)}, "
        f"an operand of {num_bytes} bytes{of}"
    )


class _Step(Sizes):
    """The communication of the parts in a step's loop over ticks."""

    def __init__(self, config: Config, operand_item: int | None, backend: Backend):
        super().__init__(config, operand_item, backend)
        self.weights = WeightTraffic(config, operand_item, backend)
        self.mixture = ExpertTraffic(config, operand_item, backend)

    @property
    def num_mlps(self) -> int:
        """Regions in a layer in place of its MLP: the MLP itself, or the mixture and any shared expert."""
        return 1 + (self.config.model.shared_expert_size > 0)

    @property
    def latent(self) -> int:
        """Numbers of a token that enter attention's region as latents."""
        model = self.config.model
        return model.query_latent_size + model.latent_size + model.rotary_size

    @property
    def num_attention(self) -> int:
        """Regions that the input of attention enters: none if queries are computed from a latent."""
        return int(not self.config.model.query_latent_size)

    @property
    def num_dense(self) -> int:
        """Regions in a layer whose input is the left factor of a weight gradient: all except a mixture's."""
        return self.num_attention + self.num_mlps - (self.config.model.num_experts > 0)

    @property
    def regathers(self) -> bool:
        """Whether a product's input is gathered again for its weight gradient."""
        return self.splits_sequence and self.config.train.remat != "layer"

    def enter(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        if self.splits_sequence:
            yield one(purpose, GATHER, (TENSOR,), self.own, self.item, times)

    def enter_backward(self, purpose: str, times: Occurrences, axes: Axes = (TENSOR,)) -> Iterator[Communication]:
        others = axes[:-1] if self.splits_sequence else axes
        if others:
            yield one(purpose, REDUCE, others, self.whole, self.item, times)
        if self.splits_sequence:
            yield one(purpose, SCATTER, (TENSOR,), self.whole, self.item, times)

    def latents(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        """Latents enter the region of attention."""
        if self.latent and self.splits_sequence:
            yield one(purpose, GATHER, (TENSOR,), (*self.own[:2], self.latent), self.item, times)

    def latents_backward(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        if self.latent:
            kind = SCATTER if self.splits_sequence else REDUCE
            yield one(purpose, kind, (TENSOR,), (*self.whole[:2], self.latent), self.item, times)

    def leave(self, purpose: str, times: Occurrences, axes: Axes = (TENSOR,)) -> Iterator[Communication]:
        others = axes[:-1] if self.splits_sequence else axes
        if self.splits_sequence:
            yield one(purpose, SCATTER, (TENSOR,), self.whole, self.item, times)
        if others:
            yield one(purpose, REDUCE, others, self.own, self.item, times)

    @property
    def vocabulary(self) -> Axes:
        return (PIPE, TENSOR) if self.splits_vocabulary else (TENSOR,)

    def broadcast(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        """Broadcast to all stages, which compute an end together."""
        if self.splits_vocabulary:
            yield one(purpose, REDUCE, (PIPE,), self.own, self.item, times)

    def embedding(self) -> Iterator[Communication]:
        """Forward, for every microbatch."""
        yield from self.weights.gathered("embedding: weights", "shared", self.of_embedding)
        yield from self.leave("embedding: activations", self.of_embedding, self.vocabulary)
        yield from self._of_ends.forward("embedding: dense layers", self.of_dense_layer(self.of_embedding))

    def embedding_backward(self) -> Iterator[Communication]:
        """Backward, for every microbatch; an embedding that is not linear in its weights runs forward again. LoRA
        freezes it."""
        if self.held.adapters:
            return
        what, times = "embedding backward: activations", self.of_embedding_backward
        yield from self.broadcast(what, times)
        if not family_of(self.config.model).linear_embedding(self.config.model):
            yield from self.weights.gathered("embedding backward: weights", "shared", times)
            yield from self.leave("embedding backward: forward again", times, self.vocabulary)
            yield from self._of_ends.forward("embedding backward: forward again", self.of_dense_layer(times))
            yield from self._of_ends.backward("embedding backward: dense layers", self.of_dense_layer(times))
        yield from self.enter(what, times)
        yield from self.weights.scattered_by_embedding("embedding backward: weights' gradients")

    def head(self) -> Iterator[Communication]:
        """Forward and backward, for every microbatch."""
        yield from self.broadcast("head: activations", self.of_head)
        yield from self.weights.gathered("head: weights", "shared", self.of_head)
        yield from self._predictions()
        for _ in range(self.config.model.num_predicting):
            yield from self._module("head: prediction modules", self.of_head)
        yield from self.weights.scattered("head: weights' gradients", "shared", self.of_head)

    def _module(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        """The embedding, the layer and the logits of a prediction module."""
        yield from self.leave(purpose, times, self.vocabulary)
        if not self.held.adapters:
            yield from self.enter(purpose, times)
        yield from self._of_ends.forward(purpose, times, dense=False)
        yield from self._of_ends.backward(purpose, times, dense=False)
        yield from self._predictions()

    def _predictions(self) -> Iterator[Communication]:
        model, times = self.config.model, self.of_head
        chooses = not FAMILIES[model.family].continues_text
        if not chooses or model.head == "pretraining":
            places = (self.rows, most_masked(self.tokens)) if chooses else self.whole[:2]
            chosen = (*places, model.hidden_size)
            if chooses and self.shared_over:
                yield one("head: masked tokens", REDUCE, self.shared_over, chosen, self.item, times)
            elif not chooses:
                yield from self.enter("head: activations", times)
            yield one("head: numbers of tokens", REDUCE, self.vocabulary, places, self.item, times)
            for _ in range(2):
                yield one("head: numbers of tokens", REDUCE, self.vocabulary, places, self.wide, times)
            if not chooses:
                yield from self.enter_backward("head: activations' gradients", times, self.vocabulary)
            else:
                # The chosen tokens are replicated over these groups, but each device uses its own parts of weights.
                alike = (CONTEXT,) * (self.way != "none")
                axes: list[Axes] = [self.vocabulary, alike]
                if self.splits_sequence:
                    axes = [(PIPE,) * self.splits_vocabulary, (*alike, TENSOR)]
                for each in filter(None, axes):
                    yield one("head: activations' gradients", REDUCE, each, chosen, self.item, times)
        if self.shared_over and model.head == "span":
            numbers = self.rows, self.tokens, 2
            yield one("head: numbers of tokens", REDUCE, self.shared_over, numbers, self.wide, times)
            if self.way != "none":
                yield one("head: losses", REDUCE, (CONTEXT,), (), self.wide, times)
        elif self.splits_sequence and chooses:  # from the first token: the loss, and the number of correct rows
            yield one("head: losses", REDUCE, (TENSOR,), (), self.wide, times)
            yield one("head: losses", REDUCE, (TENSOR,), (), self.counted, times)

    def layers(self) -> Iterator[Communication]:
        """Forward, for every microbatch."""
        yield from self.weights.gathered("layers forward: weights", "blocks", self.of_layer_forward)
        yield from self._layer_forward("layers forward: activations", self.of_layer_forward)

    def layers_backward(self) -> Iterator[Communication]:
        """Backward, for every microbatch, including recomputation."""
        config, times, again = self.config, self.of_layer, "layers backward: forward again"
        if self.recomputes_stage:
            yield from self.weights.gathered("layers backward: weights", "blocks", times)
            yield from self._layer_forward(again, times)
        yield from self.weights.gathered("layers backward: weights", "blocks", times)
        post = config.model.layer_order != "pre"  # the norm after the MLP needs its result
        needed = self.num_mlps if post else 0
        yield from self.query_key_norm("layers backward: norms of queries and keys", times)
        if config.train.remat == "layer":
            yield from self.query_key_norm(again, times)
            yield from self.latents(again, times)
            for _ in range(self.num_attention + self.num_mlps):
                yield from self.enter(again, times)
            needed += 1  # that of attention
        elif config.train.remat != "selective":
            needed = 0
        if config.train.remat in ("layer", "selective"):
            yield from self.mixture.forward(again, times, rows=config.train.remat == "layer", result=post)
        if config.train.remat == "layer":
            yield from self.attention(again, times)
        elif config.train.remat == "selective":  # it saves what was received, and what the device computed from it
            yield from self.back_from_heads(again, times)
        for _ in range(needed):
            yield from self.leave(again, times)
        yield from self.input_scales(again, times, needed)
        yield from self.attention_backward("layers backward: attention", times)
        adapted = config.lora.products(config.model)
        yield from self.mixture.backward("layers backward: experts", times)
        yield from self.latents_backward("layers backward: latents", times)
        for _ in range(1 + self.num_mlps):
            yield from self.enter("layers backward: activations", times)
        inputs: list[tuple[str, ...]] = [("query", "key", "value")] * self.num_attention
        inputs += [("gate", "up")] * self.num_mlps
        for number, by_columns in enumerate(inputs):
            trained = not self.held.adapters or any(name in adapted for name in by_columns)
            if self.regathers and not self.defers and trained and number < self.num_dense:
                yield from self.enter("layers backward: inputs of weight gradients", times)
            yield from self.enter_backward("layers backward: activations", times)
        yield from self.gradient_scales("layers backward: scales of gradients", times)
        yield from self.weights.scattered("layers backward: weights' gradients", "blocks", times, later=False)

    def weight_gradients(self) -> Iterator[Communication]:
        """Deferred weight gradients, for every microbatch."""
        if not self.defers or not (self.regathers or self.zero == 3):
            return
        times = self.weights.weight_gradient_times
        for _ in range(self.num_dense if self.regathers else 0):
            yield from self.enter("weight gradients: inputs", times)
        yield from self.weights.scattered("weight gradients: weights' gradients", "blocks", times, later=True)

    def _layer_forward(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        yield from self.query_key_norm(purpose, times)
        yield from self.attention(purpose, times)
        yield from self.mixture.forward(purpose, times)
        yield from self.input_scales(purpose, times, 1 + self.num_dense - self.num_attention)
        yield from self.through_regions(purpose, times, self.num_mlps)

    def through_regions(self, purpose: str, times: Occurrences, others: int) -> Iterator[Communication]:
        """Into the regions of attention, and as many others, and out of them."""
        yield from self.latents(purpose, times)
        for _ in range(self.num_attention + others):
            yield from self.enter(purpose, times)
        for _ in range(1 + others):
            yield from self.leave(purpose, times)

    def input_scales(self, purpose: str, times: Occurrences, count: int) -> Iterator[Communication]:
        """In 8 bits, of so many products by rows, whose inputs a tensor group shares."""
        for _ in range(count if self.operand_item else 0):
            yield one(purpose, REDUCE, (TENSOR,), (1, *self.whole[:2]), _WORD, times)

    def gradient_scales(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        """In 8 bits, of the products by columns, whose outputs' gradients a tensor group shares: those of one input
        together. Before that a head of keys that several devices use has its whole gradient."""
        model = self.config.model
        if not self.operand_item:
            return
        if model.num_kv_heads % self.config.mesh.tensor and not model.latent_size:
            for _ in ("key", "value"):
                yield one(
                    purpose, REDUCE, (TENSOR,), self._of_heads(model.num_kv_heads, self.whole[1]), self.item, times
                )
        gated = 2 if model.gated else 1
        attention = (1, 1) if model.latent_size else (3,)
        for count in (*attention, *[gated] * (self.num_dense - self.num_attention)):
            yield one(purpose, REDUCE, (TENSOR,), (count, *self.whole[:2]), _WORD, times)
        if model.num_experts:
            yield one(purpose, REDUCE, (TENSOR,), (gated, *self.mixture.computed_rows), _WORD, times)

    @cached_property
    def _of_ends(self) -> "_Step":
        """For layers of the ends, which never compute in 8 bits."""
        return _Step(self.config, 0, self.mixture.backend)

    def forward(self, purpose: str, times: Occurrences, *, dense: bool = True) -> Iterator[Communication]:
        """Forward through a layer of the ends: one of the `dense` first layers of a mixture, or a module's."""
        yield from self.query_key_norm(purpose, times)
        yield from self.attention(purpose, times)
        yield from () if dense else self.mixture.forward(purpose, times)
        yield from self.through_regions(purpose, times, 1 if dense else self.num_mlps)

    def backward(self, purpose: str, times: Occurrences, *, dense: bool = True) -> Iterator[Communication]:
        """Backward through it, with the residuals of the forward pass just before."""
        others = 1 if dense else self.num_mlps
        yield from self.query_key_norm(purpose, times)
        yield from self.attention_backward(purpose, times)
        yield from () if dense else self.mixture.backward(purpose, times)
        yield from self.latents_backward(purpose, times)
        for _ in range(1 + others):
            yield from self.enter(purpose, times)
        for number in range(self.num_attention + others):
            if self.regathers and not self.held.adapters and (dense or number < self.num_dense):
                yield from self.enter(purpose, times)
            yield from self.enter_backward(purpose, times)

    def of_dense_layer(self, embedding: Occurrences) -> Occurrences:
        """How often the program runs one of these layers, given how often it runs the embedding."""
        layers = self.config.model.dense_layers
        return Occurrences(layers * embedding.count, layers * embedding.sent)

    def _of_heads(self, heads: int, tokens: int, size: int = 0) -> tuple[int, ...]:
        return (self.rows, tokens, heads, size or self.config.model.head_size)

    @property
    def key_and_value(self) -> tuple[int, int]:
        """Sizes of a key and of a value."""
        return self.config.model.head_size, self.config.model.value_head_size

    @property
    def gathers_latents(self) -> bool:
        """Whether a context group gathers latents instead of keys and values: not in 8 bits."""
        return self.way == "gather" and self.latent > 0 and not self.operand_item

    def query_key_norm(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        """Squares of queries and keys over all heads, or their gradients."""
        model = self.config.model
        if model.query_key_norm and model.query_key_norm_over == "width":
            yield one(purpose, REDUCE, (TENSOR,), (*self.whole[:2], 2), self.wide, times)

    def attention(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        """Attention to tokens on other devices of a context group, forward."""
        yield from self.gathered_latents(purpose, times)
        yield from self.attention_of_heads(purpose, times)

    def gathered_latents(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        if self.gathers_latents:
            yield one(purpose, GATHER, (CONTEXT,), self._of_latents(self.whole[1]), self.item, times)

    def _of_latents(self, tokens: int) -> tuple[int, ...]:
        return (self.rows, tokens, self.latent - self.config.model.query_latent_size)

    def attention_of_heads(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        """The same without latents."""
        heads, keys, here = self.heads, self.keys, self.whole[1]
        if self.way == "heads":
            yield one(purpose, EXCHANGE, (CONTEXT,), self._of_heads(heads, here), self.item, times)
            number = copies(keys, self.config.mesh.context) * keys
            for size in self.key_and_value:
                yield one(purpose, EXCHANGE, (CONTEXT,), self._of_heads(number, here, size), self.item, times)
        yield from self.back_from_heads(purpose, times)
        for size in self.key_and_value if self.way == "gather" and not self.gathers_latents else ():
            yield one(purpose, GATHER, (CONTEXT,), self._of_heads(keys, here, size), self.item, times)
        for size in self.key_and_value if self.hands_on else ():
            kind = PERMUTE if self.config.mesh.pipe == 1 else GATHER  # stages come to a permute at different times
            yield one(purpose, kind, (CONTEXT,), self._of_heads(keys, self.before, size), self.item, times)

    def back_from_heads(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        """From all tokens of some heads back to the device's own tokens of all heads."""
        if self.way == "heads":
            heads, size = self.heads // self.config.mesh.context, self.key_and_value[1]
            yield one(purpose, EXCHANGE, (CONTEXT,), self._of_heads(heads, self.tokens, size), self.item, times)

    def attention_backward(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        """The gradients of attention; keys and values that were gathered are gathered again."""
        heads, keys, here, count = self.heads, self.keys, self.whole[1], self.config.mesh.context
        if self.way == "heads":
            found = self._of_heads(heads, here, self.key_and_value[1])
            yield one(purpose, EXCHANGE, (CONTEXT,), found, self.item, times)
            yield one(purpose, EXCHANGE, (CONTEXT,), self._of_heads(heads // count, self.tokens), self.item, times)
            number = copies(keys, count) * keys // count
            for size in self.key_and_value:
                yield one(purpose, EXCHANGE, (CONTEXT,), self._of_heads(number, self.tokens, size), self.item, times)
        elif self.hands_on and self.config.mesh.pipe > 1:
            for size in self.key_and_value:
                whole = (count, *self._of_heads(keys, self.before, size))
                yield one(purpose, SCATTER, (CONTEXT,), whole, self.item, times)
        else:
            yield from self.attention_of_heads(purpose, times)
        if self.gathers_latents:
            yield one(purpose, SCATTER, (CONTEXT,), self._of_latents(self.tokens), self.item, times)
            return
        for size in self.key_and_value if self.way == "gather" else ():
            yield one(purpose, SCATTER, (CONTEXT,), self._of_heads(keys, self.tokens, size), self.item, times)

    @property
    def heads(self) -> int:
        """Query heads on a device."""
        return self.config.model.num_heads // self.config.mesh.tensor

    @property
    def keys(self) -> int:
        """Key heads that a device computes with."""
        return max(1, self.config.model.num_kv_heads // self.config.mesh.tensor)

    @property
    def hands_on(self) -> bool:
        """Whether a device sends keys only to the next one."""
        return self.way == "window" and self.before > 0

    @property
    def before(self) -> int:
        """Tokens before a device's own that a window shows its first token: not as `AttentionMask` counts them."""
        return self.config.model.sliding_window - 1
