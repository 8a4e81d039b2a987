"""What the parts of a step compute on one device, in seconds on a machine: products, attention, traffic of memory.

A part that is computed again in the backward pass counts as often as it runs.
"""

import math
from dataclasses import dataclass, fields

from megajax.backend import GPU
from megajax.config import Config
from megajax.plan.activations import fused
from megajax.plan.machines import Machine, peak_of
from megajax.plan.shapes import held
from megajax.plan.sizes import Sizes

_TILE = 128  # rows and columns of a product that one multiprocessor computes at once
_SHORTEST = 1024  # inner dim below which a product's tiles are not divided among several


@dataclass(frozen=True)
class Seconds:
    """Of a part of a step."""

    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    fixed: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.traffic + self.fixed

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def times(self, factor: float) -> "Seconds":
        return Seconds(*(factor * getattr(self, each.name) for each in fields(self)))


class Work:
    """The parts of a configuration's step on a machine."""

    def __init__(self, config: Config, sizes: Sizes, machine: Machine):
        self.config, self.sizes, self.machine = config, sizes, machine
        self.peak = peak_of(machine, config.precision)
        model, tensor = config.model, config.mesh.tensor
        self.hidden, self.tokens = model.hidden_size, sizes.rows * sizes.tokens
        self.heads = model.num_heads // tensor
        self.queries = self.heads * model.head_size
        self.keys = max(1, model.num_kv_heads // tensor) * model.head_size
        self.gated = 2 if model.activation == "swiglu" else 1
        self.width = model.mlp_size // tensor
        self.vocabulary = model.padded_vocab_size // (tensor * (config.mesh.pipe if sizes.splits_vocabulary else 1))
        auto = model.scan_layers == "auto" and config.optimizer.zero == 3  # `program.scans_layers` on GPUs
        self.scanned = auto or model.scan_layers == "true"

    def product(self, rows: int, inner: int, columns: int) -> float:
        """A product [rows, inner] · [inner, columns]: at the rate of large ones, but for tiles that are not full and
        multiprocessors without one; not sooner than memory gives its operands."""
        tiles = -(-rows // _TILE) * -(-columns // _TILE)
        number = self.machine.multiprocessors
        parts = max(1, min(number // tiles, inner // _SHORTEST)) if tiles < number else 1
        rounds = math.ceil(tiles * parts / number)
        used = min(1.0, tiles * parts / (rounds * number))
        flops = 2 * tiles * _TILE * _TILE * inner
        moved = self.sizes.item * (rows * inner + inner * columns + rows * columns)
        return max(flops / (self.peak * self.machine.efficiency.products * used), self.moved(moved))

    def moved(self, num_bytes: float) -> float:
        """Bytes that memory gives or takes."""
        return num_bytes / (self.machine.bandwidth * self.machine.efficiency.traffic)

    @property
    def _shapes(self) -> list[tuple[int, int]]:
        """Of a layer's products: inner dim and columns; the last one is the MLP's second."""
        return [
            (self.hidden, self.queries + 2 * self.keys),
            (self.queries, self.hidden),
            (self.hidden, self.gated * self.width),
            (self.width, self.hidden),
        ]

    def layer_forward(self) -> Seconds:
        """Of a microbatch."""
        products = sum(self.product(self.tokens, inner, columns) for inner, columns in self._shapes)
        attention, traffic = self._attention()
        return Seconds(products, attention, traffic / 3 + self._traffic / 3, self.machine.efficiency.fixed / 3)

    def layer_again(self) -> Seconds:
        """Of the forward, what the backward pass computes again."""
        remat, forward = self.config.train.remat, self.layer_forward()
        if remat == "stage" and self.sizes.recomputes_stage:
            return forward
        if remat != "layer":
            return Seconds()
        last = self.product(self.tokens, *self._shapes[-1]) if self.config.model.layer_order == "pre" else 0.0
        return forward + Seconds(products=-last)  # nothing needs the MLP's result

    def layer_backward(self) -> Seconds:
        """Without what is computed again, and without the weights' gradients."""
        products = sum(self.product(self.tokens, columns, inner) for inner, columns in self._shapes)
        attention, traffic = self._attention()
        return Seconds(
            products, 2.5 * attention, (traffic + self._traffic) * 2 / 3, self.machine.efficiency.fixed * 2 / 3
        )

    def weight_gradients(self) -> Seconds:
        """Of a layer and a microbatch, added to their sums."""
        products = sum(self.product(inner, self.tokens, columns) for inner, columns in self._shapes)
        weights = sum(inner * columns for inner, columns in self._shapes)
        return Seconds(products, traffic=self.moved(self.machine.traffic.accumulated * weights))

    @property
    def _traffic(self) -> float:
        """Seconds of a layer's passes over activations, forward and backward."""
        passes, sizes = self.machine.traffic, self.sizes
        own = self.tokens // (self.config.mesh.tensor if sizes.splits_sequence else 1)
        inside = 2 * (self.queries + self.keys) + (self.gated + 1) * self.width
        numbers = passes.between * own * self.hidden + passes.inside * self.tokens * inside
        if sizes.splits_sequence:
            numbers += passes.gathered * self.tokens * self.hidden
        return self.moved(sizes.item * numbers) * (passes.scanned if self.scanned else 1.0)

    def _attention(self) -> tuple[float, float]:
        """Of a layer: seconds of the products forward, backward being 2.5 times as many, and of the scores' traffic
        forward and backward."""
        model, passes, efficiency = self.config.model, self.machine.traffic, self.machine.efficiency
        length = self.sizes.tokens
        seen: float = length
        if not self.sizes.bidirectional and not passes.all_scores:
            window = model.window_in(length) or length
            seen = window * (1 - window / (2 * length))  # on average, of a token
        scores = self.sizes.rows * self.heads * length * seen
        flops = 4 * scores * model.head_size
        if self.machine.fused_attention and fused(self.config, GPU):
            return flops / (self.peak * efficiency.attention), 0.0
        if not passes.all_scores and not self.sizes.bidirectional:  # by blocks, each with its last query's keys
            block = GPU.block_of(length)
            scores *= min(length, seen + block / 2) / seen
        padded = -(-model.head_size // _TILE) * _TILE / model.head_size
        products = 4 * scores * model.head_size * padded / (self.peak * efficiency.products)
        return products, self.moved(passes.scores * scores * self.sizes.item / 2)

    def embedding(self) -> Seconds:
        """Forward and backward, of a microbatch: some passes over an activation."""
        return Seconds(traffic=self.moved(6 * self.sizes.item * self.tokens * self.hidden))

    def head(self) -> Seconds:
        """Forward and backward, of a microbatch."""
        model = self.config.model
        if model.head != "pretraining":
            return Seconds()
        rows = self.sizes.rows * self.sizes.predicted
        shapes = [(rows, self.hidden, self.vocabulary), (rows, self.vocabulary, self.hidden)]
        products = sum(self.product(*each) for each in [*shapes, (self.hidden, rows, self.vocabulary)])
        passes = self.machine.traffic
        traffic = passes.logits * self.sizes.item * rows * self.vocabulary
        return Seconds(products, traffic=self.moved(traffic + passes.accumulated * self.hidden * self.vocabulary))

    def update(self) -> Seconds:
        """The optimizer, of what a device owns; with LoRA the merged weights, too."""
        own = held(self.config)
        merged = (self.sizes.wide + self.sizes.item) * own.owned if self.config.lora.rank else 0
        return Seconds(traffic=self.moved(self.machine.traffic.updated * own.trained + merged))
