"""A model of what a training step needs beside its state, the sums of gradients and what is kept of activations.

At any time one of four is under way, and the one that needs most counts: a chunk's forward, the head, a chunk's
backward, the optimizer. What each needs was read off XLA's buffers (`--xla_dump_to`, "memory-usage-report") and is said
where it is computed; docs/plan.md has a table of how far it is from them.

**CPUs compute in fp32 what is in half precision**, and XLA moves the conversions. Those of bf16 it takes out of the
loop over layers, so that the weights of a chunk and all that is kept of it are there once more in fp32, and those of
the ends twice, outside of the loop over microbatches; a buffer that a conditional writes to is copied.
fp16 it converts layer by layer. GPUs compute in half precision and hold nothing twice.

Letters: as `plan/activations.py`.
"""

from dataclasses import dataclass
from math import prod

from megajax.backend import CPU, Backend
from megajax.models.attention_mask import AttentionMask
from megajax.plan.activations import LayerSizes, chunk_layers, fused, layer_bytes
from megajax.plan.shapes import Held
from megajax.plan.sizes import Sizes

_FP32 = 4


@dataclass(frozen=True)
class Phases:
    """Bytes that the parts of a step need beside what is there all the time."""

    forward: int
    head: int
    backward: int
    optimizer: int

    @property
    def most(self) -> int:
        return max(self.forward, self.head, self.backward, self.optimizer)


@dataclass(frozen=True)
class Temporaries:
    """The model for one configuration on one kind of device.

    Attributes:
        step, layer: its sizes.
        held: its weights.
        backend: kind of device.
        kept, factors: bytes of the buffers of activations and of factors that wait.
    """

    step: Sizes
    layer: LayerSizes
    held: Held
    backend: Backend
    kept: int
    factors: int

    @property
    def phases(self) -> Phases:
        return Phases(self._forward(), self._head(), self._backward(), self._optimizer())

    @property
    def _on_cpu(self) -> bool:
        return self.backend == CPU

    @property
    def _wide(self) -> int:
        """Bytes of a number that products give."""
        return max(_FP32, self.layer.width) if self._on_cpu else self.layer.width

    @property
    def _ratio(self) -> int:
        return self._wide // self.layer.width

    @property
    def _converts(self) -> bool:
        """Whether XLA holds whole chunks in fp32, too."""
        return self._on_cpu and self.step.config.precision == "bf16"

    @property
    def _gathers(self) -> bool:
        """Whether weights are gathered for every use."""
        return self.step.zero == 3 and self.step.config.mesh.zero_shards > 1

    @property
    def _layer_weights(self) -> int:
        """Numbers in one layer's weights on a device."""
        return sum(prod(placed.whole) for placed in self.held.weights if placed.weight.stacked)

    def _forward(self) -> int:
        """A chunk's residuals, before they are put in their slot; of a pipe of one stage they are never elsewhere."""
        if self.step.config.mesh.pipe == 1:
            return 0
        return self._chunk(self.step.config.train.remat) + (self.kept if self._converts else 0)

    def _head(self) -> int:
        """Logits and, on CPUs, where XLA does not overwrite them, their gradients; and the gradient of the table,
        beside the table if it is gathered. Of a converted pair one stays as it was."""
        ends = [prod(placed.whole) for placed in self.held.weights if not placed.weight.stacked]
        pair = (3 * self._wide) // 2 if self._converts else 2 * self._wide
        table = max(ends) * (pair if self._gathers else self._wide)
        return self._logits() * (pair if self._on_cpu else self._wide) + table

    def _backward(self) -> int:
        """What is kept of the chunk, out of its slot; what is converted; and one layer's, or before the first layer, if
        that is more, the last array that is converted."""
        config, remat = self.step.config, self.step.config.train.remat
        again = "none" if remat == "stage" else remat
        chunk, piped = self._chunk(again), config.mesh.pipe > 1
        layer = self._one_layer(again)
        if not self._converts:
            return (chunk if piped else 0) + layer
        # A stage's residuals that are made here do not come out of a slot: XLA writes them in fp32.
        native = chunk if piped and remat != "stage" else 0
        last = 0 if native else self._largest(again)
        own = chunk * self._ratio + native + 2 * self.factors
        own -= 0 if piped else chunk  # it is counted as kept
        if not self._gathers:
            own += _FP32 * chunk_layers(config) * self._layer_weights
        if not piped and self.step.microbatches > 1:
            own += 2 * _FP32 * sum(placed.size for placed in self.held.weights if not placed.weight.stacked)
        return own + max(layer, last)

    def _optimizer(self) -> int:
        """The reduced gradients beside their sums, where activations were."""
        if self.step.config.mesh.zero_shards == 1 or self.step.zero == 3:
            return 0
        return max(0, self.held.trained * self.step.wide - self.kept - self.factors)

    def _chunk(self, remat: str) -> int:
        """What a chunk keeps."""
        if remat == "stage":
            return self.layer.between
        config = self.step.config
        return chunk_layers(config) * layer_bytes(config, self.layer, self.backend, remat)

    def _largest(self, remat: str) -> int:
        """The largest array that a chunk keeps."""
        layer = self.layer
        one = layer.between if remat == "layer" else max(layer.between, layer.inner, layer.queries)
        return chunk_layers(self.step.config) * one

    def _logits(self) -> int:
        """How many a microbatch has."""
        config, model, layer = self.step.config, self.step.config.model, self.layer
        if model.head != "pretraining":
            return 0
        split = config.mesh.tensor * (config.mesh.pipe if config.splits_vocabulary else 1)
        return layer.rows * self.step.predicted * (model.padded_vocab_size // split)

    def _one_layer(self, remat: str) -> int:
        """A layer's backward: what is computed again, the gradients of its input and output, and of its two halves the
        larger; with ZeRO-3 its gathered weights and their gradients."""
        layer, config = self.layer, self.step.config
        kept = (layer_bytes(config, layer, self.backend, kind) for kind in ("none", remat))
        again = next(kept) - next(kept)
        attention = self._ratio * 4 * (layer.queries + layer.keys) + self._scores()
        mlp = self._ratio * ((layer.gates + 2) * layer.inner + layer.whole)
        gathered = self._layer_weights * (self._wide + self.step.summed) if self._gathers else 0
        return self._ratio * (again + 2 * layer.whole) + max(attention, mlp) + gathered

    def _scores(self) -> int:
        """Scores, probabilities and their gradients of as many heads as are computed at once, of all blocks of queries:
        these are unrolled, and XLA runs them in any order."""
        layer, model = self.layer, self.step.config.model
        if fused(self.step.config, self.backend):
            return 0
        visible = AttentionMask(causal=not self.step.bidirectional, window=model.window_in(layer.tokens))
        block, group = self.backend.block_of(layer.tokens), layer.heads // layer.kv_heads
        ends = [(start, min(start + block, layer.tokens)) for start in range(0, layer.tokens, block)]
        ranges = ((end - start, visible.key_range(start, end, layer.tokens)) for start, end in ends)
        seen = sum(queries * (last - first) for queries, (first, last) in ranges)
        heads = layer.rows * layer.kv_heads
        if self.backend.scores_bytes is not None:
            of_block = group * min(block, layer.tokens) * layer.tokens * layer.wide
            fit = (count for count in range(1, heads + 1) if heads % count == 0)
            heads = max((count for count in fit if count * of_block <= self.backend.scores_bytes), default=1)
        return 3 * heads * group * seen * layer.wide
