"""How long the parts of a step compute on one device of a machine: products, attention, memory traffic. A part that is
recomputed in the backward pass counts as often as it runs.
"""

import math
import operator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from megajax.core.backend import GPU, Backend
from megajax.core.models.attention_mask import mean_keys_seen
from megajax.core.models.fused_attention import HEAD_SIZES
from megajax.core.models.grouped import kernels_can
from megajax.core.precision import BESIDE, COMPUTE_DTYPE
from megajax.core.program.overlap import scans_layers
from megajax.plan.costs import Product, StepCost
from megajax.plan.expert_loop import ExpertLoop
from megajax.plan.machines import Kernel, Machine, peak_of
from megajax.plan.memory import backend_of
from megajax.plan.sizes import Sizes
from megajax.plan.update import dealt
from megajax.settings.config import Config

_TILE = 128  # rows and columns of a product's tile, computed by one multiprocessor
_SHORTEST = 1024  # inner dim below which a tile is not divided among several multiprocessors


@dataclass(frozen=True)
class Seconds:
    """Seconds of a part of a step: computation, and collectives that nothing hides."""

    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    fixed: float = 0.0
    exposed: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.traffic + self.fixed + self.exposed

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*map(operator.add, vars(self).values(), vars(other).values()))

    def times(self, factor: float) -> "Seconds":
        return Seconds(*(factor * each for each in vars(self).values()))


class StepWork:
    """The parts of a configuration's step on a machine; its layers are those of a kind."""

    def __init__(self, config: Config, sizes: Sizes, machine: Machine, cost: StepCost, kind: str):
        self.config, self.sizes, self.machine, self.kind = config, sizes, machine, kind
        self.peak = peak_of(machine, BESIDE.get(config.precision, config.precision))
        self.operand_peak, model = peak_of(machine, config.precision), config.model
        self.layer, self.ends, self.linear = cost.kinds[kind][1], cost.ends, model.is_linear(kind)
        self.hidden, self.tokens = model.hidden_size, prod(sizes.whole[:2])
        self.scanned = scans_layers(config, GPU)

    def product(self, rows: int, inner: int, columns: int, count: int = 1, *, in_float8: bool = False) -> float:
        """Seconds of this many products [rows, inner] · [inner, columns] side by side: at the rate of large ones,
        reduced by partly filled tiles and idle multiprocessors, and at least as long as reading their operands takes.
        With `in_float8`, operands have 8 bits."""
        tiles = count * -(-rows // _TILE) * -(-columns // _TILE)
        processors = self.machine.multiprocessors
        parts = max(1, min(processors // tiles, inner // _SHORTEST)) if tiles < processors else 1
        rounds = math.ceil(tiles * parts / processors)
        used = min(1.0, tiles * parts / (rounds * processors))
        flops = 2 * tiles * _TILE * _TILE * inner
        item, peak = self.sizes.item, self.peak
        operands = item
        if in_float8 and self.sizes.operand_item:
            operands, peak = self.sizes.operand_item, self.operand_peak
        moved = count * (operands * (rows * inner + inner * columns) + item * rows * columns)
        return max(flops / (peak * self.machine.efficiency.products * used), self.moved(moved))

    def moved(self, num_bytes: float) -> float:
        """Seconds to read or write bytes in memory."""
        return num_bytes / (self.machine.bandwidth * self.machine.efficiency.traffic)

    @cached_property
    def _shapes(self) -> list[tuple[int, int, int, int]]:
        """A layer's products with weights: rows, inner dim, columns, and number of experts of each."""
        return [self._shape(product) for product in self.layer.products]

    def _shape(self, product: Product) -> tuple[int, int, int, int]:
        rows, inner, columns = product.dims.shape(self.sizes.microbatch)
        number = max(1, product.experts)
        padded = self._backend.expert_block // 2 if self._grouped(product) else 0  # half of an expert's last block
        return -(-rows // number) + padded, inner, columns, number

    @cached_property
    def _backend(self) -> Backend:
        backend = backend_of(self.machine)
        return backend.deterministic if self.config.deterministic else backend

    def _grouped(self, product: Product) -> bool:
        """Whether the kernels of dropless experts multiply it."""
        _, inner, columns = product.dims.fixed
        dtype, block = COMPUTE_DTYPE[self.config.precision], self._backend.expert_block
        fits = kernels_can(dtype, block, inner, columns // product.weights) and self._backend.expert_kernel
        return fits and product.experts > 0 and not self.config.model.expert_capacity

    @property
    def groups_by_kernel(self) -> bool:
        """Whether kernels multiply the rows of dropless experts."""
        return any(map(self._grouped, self.layer.products))

    @cached_property
    def expert_loop(self) -> ExpertLoop | None:
        """The loop that dropless experts run without kernels."""
        first = next((product for product in self.layer.products if product.experts), None)
        if first is None or self.config.model.expert_capacity or self._grouped(first):
            return None
        return ExpertLoop.from_config(self.config, self._backend, first, self.sizes.microbatch, self.sizes.item)

    def _multiplied(self, product: Product, *, backward: bool = False) -> Seconds:
        """A product of the layer, or `backward` that of its output's gradient."""
        rows, inner, columns, count = self._shape(product)
        if product.experts and self.expert_loop:
            columns //= product.weights
            one = self._in_loop(self.expert_loop, *((columns, inner) if backward else (inner, columns)))
            transposed = 2 * self.sizes.item * count * inner * columns if backward else 0  # a copy of all weights
            return (one + Seconds(traffic=self.moved(transposed))).times(product.weights)
        shape = (rows, columns, inner, count) if backward else (rows, inner, columns, count)
        return Seconds(self.product(*shape, in_float8=True) / self._rate(product))

    def _rate(self, product: Product) -> float:
        """Of a product's kernel, relative to a large product."""
        return self.machine.efficiency.grouped if self._grouped(product) else 1.0

    def _in_loop(self, loop: ExpertLoop, inner: int, columns: int) -> Seconds:
        """The loop of dropless experts: a turn copies its rows and weights, and its results to their place, which is
        zeros at first."""
        item = self.sizes.item
        given = self.sizes.operand_item or item
        copied = loop.blocks * (given * (loop.block_rows + columns) * inner + item * loop.block_rows * columns)
        product = self.product(loop.block_rows, inner, columns, loop.blocks, in_float8=True)
        turn = Seconds(product, 0.0, self.moved(2 * copied), self.machine.efficiency.turn)
        return turn.times(loop.turns) + Seconds(traffic=self.moved(item * loop.rows * columns))

    def _gradient(self, product: Product) -> Seconds:
        """The gradient of a product's weights. In the loop of dropless experts a turn copies its rows and the gradients
        of their outputs, writes a product for every block and adds it to the sums; these are zeros at first, and
        rounded at the end."""
        rows, inner, columns, count = self._shape(product)
        if not product.experts or not self.expert_loop:
            return Seconds(self.product(inner, rows, columns, count) / self._rate(product))
        loop, item, wide = self.expert_loop, self.sizes.item, max(4, self.sizes.item)
        columns //= product.weights
        operands, sums = loop.blocks * loop.block_rows * (inner + columns), loop.blocks * inner * columns
        multiplied = self.product(inner, loop.block_rows, columns, loop.blocks)
        multiplied = max(multiplied, self.moved(item * operands + wide * sums))
        turn = Seconds(multiplied, 0.0, self.moved(2 * item * operands + 3 * wide * sums), self.machine.efficiency.turn)
        once = Seconds(traffic=self.moved((2 * wide + item) * count * inner * columns))
        return (turn.times(loop.turns) + once).times(product.weights)

    @cached_property
    def _beside(self) -> Seconds:
        """A layer's forward pass without its products."""
        attention, _, traffic = self._attention
        return Seconds(0.0, attention, traffic / 3 + self._traffic / 3, self.machine.efficiency.fixed / 3)

    @cached_property
    def layer_forward(self) -> Seconds:
        """The forward pass of a layer for a microbatch."""
        return sum(map(self._multiplied, self.layer.products), start=self._beside)

    @cached_property
    def layer_again(self) -> Seconds:
        """The part of the forward pass that the backward pass recomputes."""
        if self.sizes.recomputes_stage:
            return self.layer_forward
        beside = self._beside if self.config.train.remat == "layer" else Seconds()
        return sum((self._multiplied(each) for each in self.layer.products if each.again), start=beside)

    @cached_property
    def layer_backward(self) -> Seconds:
        """The backward pass of a layer, without recomputation and weight gradients."""
        products = (self._multiplied(each, backward=True) for each in self.layer.products)
        return sum(products, start=self._beside_backward)

    @cached_property
    def _beside_backward(self) -> Seconds:
        """The same without its products."""
        _, attention, traffic = self._attention
        traffic = (traffic + self._traffic) * 2 / 3
        return Seconds(0.0, attention, traffic, self.machine.efficiency.fixed * 2 / 3)

    @cached_property
    def weight_gradients(self) -> Seconds:
        """Weight gradients of a layer for a microbatch, added to their sums; with LoRA, only those of adapters."""
        if self.config.lora.rank:
            sizes = [prod(weight.whole) for weight in self.sizes.held.adapters if self.kind in ("", *weight.path)]
            rank, rows = self.config.lora.rank, self.tokens
            products = sum(self.product(size // rank, rows, rank) for size in sizes)
            return Seconds(products, traffic=self.moved(self.machine.traffic.accumulated * sum(sizes)))
        numbers = sum(inner * columns * count for _, inner, columns, count in self._shapes)
        added = Seconds(traffic=self.moved(self.machine.traffic.accumulated * numbers))
        return sum(map(self._gradient, self.layer.products), start=added)

    @cached_property
    def _traffic(self) -> float:
        """Seconds of a layer's passes over activations, forward and backward."""
        passes, sizes = self.machine.traffic, self.sizes
        tokens = self.tokens // (self.config.mesh.tensor if sizes.splits_sequence else 1)
        # One side of every product is an activation between regions, or a row of an expert.
        inside = sum(rows * inner * columns for rows, inner, columns in self._in_memory) // self.hidden
        numbers = passes.between * tokens * self.hidden + passes.inside * inside
        numbers += passes.dispatched * self._dispatched * self.hidden
        if sizes.splits_sequence:
            numbers += passes.gathered * self.tokens * self.hidden
        numbers += self._rounded
        return self.moved(sizes.item * numbers) * (passes.scanned if self.scanned else 1.0)

    @cached_property
    def _in_memory(self) -> list[tuple[int, int, int]]:
        """Rows, inner dim and columns of the products' operands and results. Dropless experts keep all rows of their
        blocks, used or not."""
        return [
            (self.expert_loop.rows if each.experts and self.expert_loop else rows * count, inner, columns)
            for each, (rows, inner, columns, count) in zip(self.layer.products, self._shapes, strict=True)
        ]

    @property
    def _rounded(self) -> float:
        """Passes over values that are rounded to 8 bits, forward and backward, in numbers of the compute dtype: they
        are read for their scales, read again and written."""
        share = self.sizes.operand_item / self.sizes.item
        numbers = sum(rows * (inner + columns) for rows, inner, columns in self._in_memory)
        return (2 + share) * numbers if share else 0.0

    @property
    def _dispatched(self) -> int:
        """Rows that experts get."""
        pairs = zip(self.layer.products, self._in_memory, strict=True)
        return max((rows for each, (rows, _, _) in pairs if each.experts), default=0)

    @cached_property
    def kernel(self) -> Kernel | None:
        """Our own kernel if it computes attention: because it was asked for, or because cuDNN cannot and the kernel is
        estimated to be faster."""
        model, kernel = self.config.model, self.machine.kernel
        possible = self.sizes.item == 2 and model.head_size in HEAD_SIZES and model.scores == "plain"
        if kernel is None or self.linear or not possible or model.attention not in ("auto", "kernel"):
            return None
        asked = model.attention == "kernel"
        faster = not self.layer.fused and sum(self._by_kernel(kernel)) < sum(self._by_blocks())
        return kernel if asked or faster else None

    @cached_property
    def _attention(self) -> tuple[float, float, float]:
        """Attention of a layer: seconds of computation forward and backward, and of the scores' memory traffic in
        both."""
        if self.linear:
            return self._by_chunks()
        if self.kernel is not None:
            return *self._by_kernel(self.kernel), 0.0
        return (*self._fused(), 0.0) if self.layer.fused else self._by_blocks()

    def _fused(self) -> tuple[float, float]:
        model = self.config.model
        size = 2 * max(model.head_size, model.value_head_size)  # smaller values are padded
        seconds = self._seen * 2 * size / (self.peak * self.machine.efficiency.attention)
        return seconds, 2.5 * seconds

    @property
    def _seen(self) -> float:
        """Scores of a layer that queries see, ignoring documents."""
        length = self.sizes.tokens
        of_token = mean_keys_seen(self.config.model, length)
        return self.sizes.rows * self.sizes.attention_heads * length * of_token

    def _by_kernel(self, kernel: Kernel) -> tuple[float, float]:
        forward, backward = self._fused()
        more = [self._seen * each / self.peak if self.config.model.dropout else 0.0 for each in kernel.dropped]
        return forward + more[0], backward + more[1]

    def _by_chunks(self) -> tuple[float, float, float]:
        """Linear attention (`core/models/delta_chunks.py`), in fp32: the products of a chunk, with its inverse and with
        the state, and the arrays that they read and write; in a context group once more, for the states between pieces.
        The backward pass computes them again, and twice as many."""
        model, times = self.config.model, 1 if self.sizes.way == "none" else 2
        tokens = times * self.tokens * model.linear_heads // self.config.mesh.tensor
        key, value, chunk = model.linear_key_size, model.linear_value_size, min(model.linear_chunk, self.sizes.tokens)
        flops = 2 * (3 * chunk * key + 2 * chunk * value + chunk**2 // 3 + 3 * key * value)
        moved = 4 * (8 * key + 6 * value + 8 * chunk + 4 * key * value // chunk)
        seconds = tokens * flops / (peak_of(self.machine, "fp32") * self.machine.efficiency.products)
        return seconds, 3 * seconds, 4 * tokens * self.moved(moved)

    def _by_blocks(self) -> tuple[float, float, float]:
        model, passes, efficiency = self.config.model, self.machine.traffic, self.machine.efficiency
        length, heads = self.sizes.tokens, self.sizes.rows * self.sizes.attention_heads
        seen, _ = self.sizes.scores_of_head(GPU)
        scores = heads * (length * self.sizes.queries if passes.all_scores else seen)
        padded = sum(-(-size // _TILE) * _TILE for size in (model.head_size, model.value_head_size))
        products = 2 * scores * padded / (self.peak * efficiency.products)
        of_score = passes.scores + (passes.dropped if model.dropout else 0.0)
        return products, 2.5 * products, self.moved(of_score * scores * self.sizes.item / 2)

    @cached_property
    def embedding(self) -> Seconds:
        """Forward and backward of the embedding for a microbatch: some passes over an activation."""
        return Seconds(traffic=self.moved(6 * self.sizes.item * self.tokens * self.hidden))

    @cached_property
    def head(self) -> Seconds:
        """Forward and backward of the head for a microbatch, with prediction modules."""
        passes, rows = self.machine.traffic, self.sizes.microbatch
        products = sum(self.product(*dims.shape(rows)) for dims in self.ends.products)
        gradients = [dims.fixed for dims in self.ends.products if dims.of_row[1]]  # they sum over rows
        weights = sum(inner * columns for inner, _, columns in gradients)
        modules = self.config.model.num_predicting
        logits = (1 + modules) * prod(self.ends.logits.shape(rows))
        layers = (self._beside + self._beside_backward).times(modules)
        traffic = passes.logits * self.sizes.item * logits + passes.accumulated * weights
        return Seconds(products, traffic=self.moved(traffic)) + layers

    # The following depend on the ZeRO stage, which is that of `sizes`.

    def update(self, sizes: Sizes) -> Seconds:
        """The optimizer's update of what a device owns."""
        return Seconds(traffic=self.moved(self.machine.traffic.updated * sizes.held.num_trained))

    def copies(self, sizes: Sizes) -> Seconds:
        """Rounding the layers' weights to 8 bits: each is read for its scales and again to be rounded, in both
        orders."""
        numbers = sum(each.size(each.computed) for each in sizes.copied_in_step)
        return Seconds(traffic=self.moved(2 * (2 * self.sizes.item + self.sizes.operand_item) * numbers))

    def muon(self, sizes: Sizes) -> Seconds:
        """Newton-Schulz steps of a device's share of the matrices."""
        options = self.config.optimizer
        slower = self.peak / peak_of(self.machine, "fp32") if options.muon_precision == "fp32" else 1.0
        products = sum(
            2 * self.product(group.share * group.rows, group.columns, group.rows)
            + self.product(group.share * group.rows, group.rows, group.rows)
            for group in dealt(sizes)
        )
        return Seconds(products=options.muon_steps * slower * products)
