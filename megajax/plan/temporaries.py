"""A model of what a training step needs beside its state, the sums of gradients and what is kept of activations.

At any time one of four is under way, and the one that needs most counts: a chunk's forward, the head, a chunk's
backward, the optimizer. What each needs was read off XLA's buffers (`--xla_dump_to`, "memory-usage-report") and is said
where it is computed, by the arrays of a traced layer (`plan/traced.py`); docs/plan.md has a table of how far it is from
them.

**CPUs compute in fp32 what is in half precision**, and XLA moves the conversions. Those of bf16 it takes out of the
loop over layers, so that the weights of a chunk and all that is kept of it are there once more in fp32, and those of
the ends twice, outside of the loop over microbatches; a buffer that a conditional writes to is copied.
fp16 it converts layer by layer. GPUs compute in half precision and hold nothing twice.
"""

from dataclasses import dataclass
from math import prod

from megajax.backend import CPU, Backend
from megajax.plan.costs import Region, StepCost
from megajax.plan.shapes import Held
from megajax.plan.sizes import Sizes, scores_of_head

_FP32 = 4


@dataclass(frozen=True)
class Temporaries:
    """The model for one configuration on one kind of device.

    Attributes:
        step: its sizes.
        cost: what is traced of its layers and ends.
        held: its weights.
        backend: kind of device.
        kept, factors: bytes of the buffers of activations and of factors that wait.
    """

    step: Sizes
    cost: StepCost
    held: Held
    backend: Backend
    kept: int
    factors: int

    @property
    def most(self) -> int:
        """Bytes that the part of the step that needs most has beside what is there all the time."""
        return max(self._forward(), self._head(), self._backward(), self._optimizer())

    @property
    def _on_cpu(self) -> bool:
        return self.backend == CPU

    @property
    def _wide(self) -> int:
        """Bytes of a number that products give."""
        return max(_FP32, self.step.item) if self._on_cpu else self.step.item

    @property
    def _ratio(self) -> int:
        return self._wide // self.step.item

    @property
    def _converts(self) -> bool:
        """Whether XLA holds whole chunks in fp32, too."""
        return self._on_cpu and self.step.config.precision == "bf16"

    @property
    def _piped(self) -> bool:
        return self.step.config.mesh.pipe > 1

    @property
    def _gathers(self) -> bool:
        """Whether weights are gathered for every use."""
        return self.step.zero == 3 and self.step.config.mesh.zero_shards > 1

    @property
    def _layer_weights(self) -> int:
        """Numbers in one layer's weights on a device."""
        return sum(prod(placed.whole) for placed in self.held.weights if placed.weight.stacked)

    @property
    def _residuals(self) -> int:
        """Bytes of a chunk's residuals."""
        return self.step.layers_of_chunk * self.cost.layer.residuals.num_bytes(self.step.microbatch)

    def _forward(self) -> int:
        """A chunk's residuals, before they are put in their slot; of a pipe of one stage they are never elsewhere."""
        if not self._piped:
            return 0
        residuals = self.step.activation_bytes if self.step.recomputes_stage else self._residuals
        return residuals + (self.kept if self._converts else 0)

    def _head(self) -> int:
        """Logits and, on CPUs, where XLA does not overwrite them, their gradients; and the gradient of the table,
        beside the table if it is gathered. Of a converted pair one stays as it was."""
        weights = [prod(placed.whole) for placed in self.held.weights if not placed.weight.stacked]
        logits = prod(self.cost.ends.logits.shape(self.step.microbatch))
        pair = (3 * self._wide) // 2 if self._converts else 2 * self._wide
        table = max(weights) * (pair if self._gathers else self._wide)
        return logits * (pair if self._on_cpu else self._wide) + table

    def _backward(self) -> int:
        """What is kept of the chunk, out of its slot; what is converted; and one layer's, or before the first layer, if
        that is more, the last array that is converted."""
        chunk, layer = self._residuals, self._one_layer()
        if not self._converts:
            return (chunk if self._piped else 0) + layer
        # A stage's residuals that are made here do not come out of a slot: XLA writes them in fp32.
        native = chunk if self._piped and not self.step.recomputes_stage else 0
        own = chunk * self._ratio + native + 2 * self.factors
        own -= 0 if self._piped else chunk  # it is counted as kept
        if not self._gathers:
            own += _FP32 * self.step.layers_of_chunk * self._layer_weights
        if not self._piped and self.step.microbatches > 1:
            own += 2 * _FP32 * sum(placed.size for placed in self.held.weights if not placed.weight.stacked)
        largest = self.cost.layer.residuals.largest(self.step.microbatch)
        return own + max(layer, 0 if native else self.step.layers_of_chunk * largest)

    def _optimizer(self) -> int:
        """The reduced gradients beside their sums, where activations were."""
        if self.step.config.mesh.zero_shards == 1 or self.step.zero == 3:
            return 0
        return max(0, self.held.trained * self.step.wide - self.kept - self.factors)

    def _one_layer(self) -> int:
        """A layer's backward: what is computed again, the gradients of its input and output, and of its regions the
        largest; with ZeRO-3 its gathered weights and their gradients."""
        rows = self.step.microbatch
        again = self.cost.without_remat.residuals.num_bytes(rows) - self.cost.layer.residuals.num_bytes(rows)
        entered = prod(self.step.whole) * self.step.item
        regions = max(self._region(region) for region in self.cost.layer.regions)
        gathered = self._layer_weights * (self._wide + self.step.summed) if self._gathers else 0
        return self._ratio * (again + 2 * entered) + regions + gathered

    def _region(self, region: Region) -> int:
        """A region's backward: what its first product gave and its gradient, and what its last product takes, with its
        gradient. Without attention the former is kept, and the result's gradient is there."""
        first, last = (product.shape(self.step.microbatch) for product in (region.products[0], region.products[-1]))
        given, taken, result = first[0] * first[2], last[0] * last[1], last[0] * last[2]
        if region.attends:
            return self._wide * 2 * (given + taken) + self._scores()
        return self._wide * (given + 2 * taken + result)

    def _scores(self) -> int:
        """Scores, probabilities and their gradients of as many heads as are computed at once, of all blocks of queries:
        these are unrolled, and XLA runs them in any order."""
        if self.cost.layer.fused:
            return 0
        step, model = self.step, self.step.config.model
        all_heads = model.num_heads // step.config.mesh.tensor
        kv_heads = max(1, model.num_kv_heads // step.config.mesh.tensor)
        group, heads = all_heads // kv_heads, step.rows * kv_heads
        if self.backend.scores_bytes is not None:
            of_block = group * min(self.backend.block_of(step.tokens), step.tokens) * step.tokens * step.wide
            fit = (count for count in range(1, heads + 1) if heads % count == 0)
            heads = max((count for count in fit if count * of_block <= self.backend.scores_bytes), default=1)
        return 3 * heads * group * scores_of_head(model, self.backend) * step.wide
