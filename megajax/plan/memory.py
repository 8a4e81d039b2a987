"""How much of a device's memory a training step needs, in bytes by part.

Weights, main weights, moments and gradient sums are exact (`program.memory.state_bytes`), and so are saved activations
and the factors of deferred weight gradients, which are those of a traced layer (`plan/traced.py`). The rest is a model
(`Temporaries`); docs/plan.md says how far it is from what XLA allocates.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from megajax.core.backend import BLOCKS, CPU, GPU, Backend
from megajax.core.config import MeshConfig
from megajax.core.models.blocked_attention import heads_at_once
from megajax.core.models.freeze import PREDICTION
from megajax.core.models.grouped import kernels_can
from megajax.core.optim.own import own_optimizer
from megajax.core.pipeline.config import PipelineConfig
from megajax.core.pipeline.deferral import PassTimes
from megajax.core.pipeline.schedule import make_schedule
from megajax.core.precision import COMPUTE_DTYPE
from megajax.core.program.memory import kept_bytes, whole_bytes
from megajax.core.program.overlap import reduces_per_step, scans_layers
from megajax.core.program.program import Program, batch_form
from megajax.plan.costs import Region, StepCost
from megajax.plan.machines import Machine
from megajax.plan.sizes import DeviceWeights, Sizes, held, steady_state_microbatches
from megajax.plan.traced import step_cost
from megajax.plan.update import dealt, matrices_of
from megajax.settings.config import Config

_WORD = 4  # bytes of an element of the batch
_FP32 = 4
# Of what exists only during the step, on GPUs: the most that unrolled layers needed beyond scanned ones' estimate in
# three steps compiled for H200s, 12.1 of 7.0 GiB (docs/benchmarks/planning.md).
_UNROLLED = 0.75


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. Weights, main weights, moments, average and copies of frozen weights last from step to
    step."""

    weights: int
    main_weights: int
    moments: int
    average: int  # of the weights, with `train.ema`
    batch: int  # a device's rows
    frozen_copies: int  # of frozen weights in 8 bits, with their scales
    copies: int  # the same of trained weights
    gathered: int  # weights of layers, if a step leaves them sharded
    gradients: int  # their sums, and where these are in half precision, what the optimizer gets
    kept: int  # of activations, until their backward pass
    factors: int  # of weight gradients that wait
    p2p_transfers: int  # activations and gradients on their way between stages, and those that wait to be used
    temporaries: int  # of the layer and the end that run, and of the optimizer
    unrolled: int  # what XLA may allocate besides if layers are unrolled

    @property
    def state(self) -> int:
        """What exists before the step."""
        return self.weights + self.main_weights + self.moments + self.average + self.batch + self.frozen_copies

    @property
    def of_step(self) -> int:
        """What exists only during the step."""
        return self.total - self.state

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def backend_of(machine: Machine) -> Backend:
    """The forms that suit a GPU: cuDNN's attention if there is one, our kernels of experts where these run."""
    attention = GPU.attention if machine.fused_attention else BLOCKS
    return replace(GPU, attention=attention, expert_kernel=machine.kernel is not None)


def memory(config: Config, backend: Backend = GPU, cost: StepCost | None = None) -> Memory:
    """What a step of a valid configuration needs on a device of its mesh."""
    return MemoryModel(config, backend, cost or step_cost(config, backend)).memory(config)


class MemoryModel:
    """The memory of configurations that differ only in the schedule, the chunks and the placement of layers; a search
    computes all else once."""

    def __init__(self, config: Config, backend: Backend, cost: StepCost):
        self._step, self._pipe, self._backend = Sizes(config, backend=backend), config.mesh.pipe, backend
        form, step = batch_form(config), self._step
        self._losses = (len(form.targets | form.measures) + config.model.num_predicting) * max(4, step.summed)
        texts = form.shapes(config.train.global_batch, tokens=step.tokens).values()
        self._batch = sum(map(prod, texts)) * _WORD // config.mesh.row_shards
        self._residuals = cost.layer.residuals.num_bytes(step.microbatch)  # of a layer, as its factors
        self._factors = cost.layer.factors.num_bytes(step.microbatch)
        self._copies, self._copies_of_step = (
            sum(map(step.bytes_of_copies, found)) for found in (step.copied, step.copied_in_step)
        )
        self._temporaries = Temporaries(step, cost, backend)

    def memory(self, config: Config) -> Memory:
        """That of one of them."""
        step, pipeline, pipe = self._step.placed(config), config.pipeline, self._pipe
        shape = pipeline.schedule, pipe, step.microbatches, pipeline.chunks
        slots, factor_slots, activations = _buffers(*shape, pipeline.deferring())
        layers = step.layers_of_chunk
        saved = step.activation_bytes if step.recomputes_stage else layers * self._residuals
        kept = max(1 + step.pairs_microbatches, slots) * saved
        factors, held = factor_slots * layers * self._factors, _held_bytes(step, step.held)
        held["moments"] += optimizer_bytes(step)[1]
        held["gradients"] += self._losses
        copies, copies_of_step = (layers * pipeline.chunks * each for each in (self._copies, self._copies_of_step))
        needed = Memory(
            **held,
            batch=self._batch,
            frozen_copies=copies - copies_of_step,
            copies=copies_of_step,
            kept=kept,
            factors=factors,
            p2p_transfers=activations * step.activation_bytes,
            temporaries=self._temporaries.most(step, kept, factors),
            unrolled=0,
        )
        unrolls = layers > 1 and self._backend != CPU and not scans_layers(config, self._backend)
        return replace(needed, unrolled=int(_UNROLLED * needed.of_step)) if unrolls else needed


def _held_bytes(step: Sizes, held: DeviceWeights) -> dict[str, int]:
    """Bytes of weights and of what a step has for each of them."""
    main, others = held.num_trained * step.wide, step.summed != step.wide
    in_matrices = sum(each.size(each.owned) for each in matrices_of(step))
    return {
        "weights": held.computed_bytes(step.item, step.wide),
        "gathered": held.gathered_bytes(step.item, step.wide),
        "main_weights": main if step.item != step.wide else 0,
        "moments": held.num_trained * optimizer_bytes(step)[0] - in_matrices * step.wide,
        "average": main if step.config.train.ema else 0,
        "gradients": held.num_summed * step.summed + main * others,
    }


def optimizer_bytes(step: Sizes) -> tuple[int, int, int]:
    """Bytes of an optimizer's state for each number that a device trains, those of AdamW for Muon, and of the rest,
    which every device has; and of the whole gradients, weights and updates that some of the user's need."""
    config = step.config
    if own_optimizer(config.optimizer, config.own_optimizer) is None:
        return 2 * step.wide, 2 * 4, 0  # two moments, two counters
    train = replace(config.train, global_batch=1, microbatch=1, remat="none", ramp_start=0)
    alone = replace(config, mesh=MeshConfig(), pipeline=PipelineConfig(), train=train, sequence_parallel=False)
    return _own_state_bytes(replace(alone, optimizer=replace(config.optimizer, zero=0, zero_ranks=0)))


@lru_cache(maxsize=64)
def _own_state_bytes(alone: Config) -> tuple[int, int, int]:
    layout = Program.abstract(alone, CPU).layout
    kept, whole = kept_bytes(layout)["moments"], sum(whole_bytes(layout).values())
    return (0, kept, whole) if whole else (*divmod(kept, held(alone).num_trained), 0)


def padding(config: Config, needed: Memory) -> int:
    """Bytes of the memory `needed` that hold no layer on the stage with the fewest layers."""
    step = Sizes(config)
    slots = step.layers_of_chunk * config.pipeline.chunks
    parts = step.held.weights, step.held.adapters
    stacked = DeviceWeights(*(tuple(each for each in part if each.stack) for part in parts))
    kept = 0 if step.recomputes_stage else needed.kept
    of_layers = sum(_held_bytes(step, stacked).values()) + needed.frozen_copies + needed.copies + kept + needed.factors
    return of_layers * (slots - int(step.placement.counts.sum(0).min())) // slots


def _buffers(name: str, pipe: int, microbatches: int, chunks: int, deferring: PassTimes | None) -> tuple[int, int, int]:
    """How many chunks a schedule saves, how many chunks' factors, and how many activations are in transit or waiting
    (stage inputs or outputs). They are those of fewer microbatches where the schedule repeats itself; GPipe keeps
    one more of each for every microbatch."""
    settled = steady_state_microbatches(name, pipe, microbatches)
    if name != "gpipe" or pipe == 1 or microbatches <= 2 * pipe:
        return _counted(name, pipe, settled, chunks, deferring)
    slots, factors, activations = _counted(name, pipe, 2 * pipe, chunks, deferring)
    more = microbatches - 2 * pipe
    return slots + more, factors, activations + more


@lru_cache(maxsize=4096)
def _counted(name: str, pipe: int, microbatches: int, chunks: int, deferring: PassTimes | None) -> tuple[int, int, int]:
    """The same, from the schedule's table."""
    table = make_schedule(name, pipe, microbatches, chunks, deferring)
    if pipe == 1:
        return table.num_slots, table.num_factor_slots, 0
    waiting = [0 if way.direct else way.inbox_depth + 1 for way in (table.forward, table.backward)]
    outputs = 0 if table.turns_at_once else table.num_slots
    on_their_way = 2  # one in each direction
    return table.num_slots, table.num_factor_slots, on_their_way + sum(waiting) + outputs


class Temporaries:
    """What a step needs besides its state, the gradient sums and saved activations; `kept` and `factors` are the bytes
    of the last two.

    At any time one of four parts is running, and the one that needs most counts: a chunk's forward, the head, a chunk's
    backward, the optimizer. What each needs was read from XLA's buffers (`--xla_dump_to`, "memory-usage-report") and is
    described where it is computed, in terms of a traced layer's arrays (`plan/traced.py`).

    CPUs compute half precision in fp32, layer by layer, and GPUs as it is. What XLA would convert before the loop over
    layers is not in what `plan/compiled.py` compiles.
    """

    def __init__(self, step: Sizes, cost: StepCost, backend: Backend):
        self.step, self.cost, self.backend = step, cost, backend
        mesh, self._rows = step.config.mesh, step.microbatch
        self._on_cpu = backend == CPU
        self._wide = max(_FP32, step.item) if self._on_cpu else step.item  # bytes per element of a product's result
        self._ratio = self._wide // step.item
        self._piped = mesh.pipe > 1
        self._gathers = step.zero == 3 and mesh.zero_shards > 1  # gathers weights for every use
        self._residuals = cost.layer.residuals.num_bytes(self._rows)  # of a layer
        weights = step.held.weights
        self._stacked = [weight for weight in weights if weight.stack]
        self._end_weights = [prod(w.whole) for w in weights if not w.stack]
        self._modules = step.config.model.num_predicting
        self._module_weights = sum(prod(w.whole) for w in weights if w.path[1] == PREDICTION and self._modules)

    def most(self, step: Sizes, kept: int, factors: int) -> int:
        """Bytes needed by the part of the step that needs most, besides what exists all the time; `step` places the
        layers."""
        return max(self._forward(step), self._head, self._backward(step), self._optimizer(step, kept, factors))

    def _forward(self, step: Sizes) -> int:
        """A chunk's residuals before they are put in their slot; with one stage they are never anywhere else."""
        if not self._piped:
            return 0
        return step.activation_bytes if step.recomputes_stage else step.layers_of_chunk * self._residuals

    @cached_property
    def _head(self) -> int:
        """Logits and (on CPUs, where XLA does not overwrite them) their gradients; and the gradient of the table, plus
        the table if it is gathered. Of prediction modules, the logits, too, what their layers save, and their
        gradients."""
        logits = (1 + self._modules) * prod(self.cost.ends.logits.shape(self._rows))
        table = max(self._end_weights) * (1 + self._gathers)
        _, layer, plain = [*self.cost.kinds.values()][-1]
        kept = self._modules * plain.residuals.num_bytes(self._rows) * self._ratio
        layers = kept + max(map(self._region, layer.regions), default=0) if self._modules else 0
        return self._wide * (logits * (1 + self._on_cpu) + table + self._module_weights) + layers

    def _backward(self, step: Sizes) -> int:
        """The chunk's residuals, taken out of their slot, and of two kinds those of a run in one of its periods; and a
        layer's backward."""
        chunk = step.layers_of_chunk * self._residuals if self._piped else 0
        runs = [slots * layer.residuals.num_bytes(self._rows) for slots, layer, _ in self.cost.kinds.values()]
        run = max(runs) if len(runs) > 1 < step.layers_of_chunk else 0
        return chunk + run + self._one_layer + self._reduced(step)

    def _reduced(self, step: Sizes) -> int:
        """The layers' reduced gradients, if the last backward pass makes them."""
        return step.held.num_trained_of_layers * step.wide if step.overlaps_reductions else 0

    def _optimizer(self, step: Sizes, kept: int, factors: int) -> int:
        """Reduced gradients next to their sums, where activations were; and for the matrices that Muon deals out, what
        is exchanged, and the products; and what an optimizer of the user's needs whole."""
        reduced = 0
        if reduces_per_step(step.config):
            reduced = step.held.num_trained * step.wide
        item = step.wide if step.config.optimizer.muon_precision == "fp32" else self._wide
        shares = sum(each.share * each.rows * (each.rows + 2 * each.columns) * item for each in dealt(step))
        handed = sum(2 * prod(each.operand) * step.wide for each in dealt(step) if each.devices > 1)
        return max(0, reduced + shares + handed + optimizer_bytes(step)[2] - kept - factors)

    @cached_property
    def _one_layer(self) -> int:
        """The backward of a layer of the kind that needs most."""
        return max(map(self._of_kind, self.cost.kinds))

    def _of_kind(self, kind: str) -> int:
        """A layer's backward: what is recomputed, the gradients of its input and output, and its largest region; with
        ZeRO-3 also its gathered weights and their gradients."""
        _, layer, plain = self.cost.kinds[kind]
        again = plain.residuals.num_bytes(self._rows) - layer.residuals.num_bytes(self._rows)
        entered = prod(self.step.whole) * self.step.item
        weights = sum(prod(weight.whole) for weight in self._stacked if kind in ("", *weight.path))
        gathered = weights * (self._wide + self.step.summed) if self._gathers else 0
        linear = self.step.config.model.is_linear(kind)
        region = max((self._region(each, linear) for each in layer.regions), default=0)
        return self._ratio * (again + 2 * entered) + region + gathered

    def _region(self, region: Region, linear: bool = False) -> int:
        """A region's backward: the results of its first products with their gradients, and the input of its last
        product with its gradient. Without attention the former are saved already, and the output's gradient is
        needed."""
        *others, last = (product.dims.shape(self._rows) for product in region.products)
        produced = sum(rows * columns for rows, _, columns in others or [last])
        consumed, result = last[0] * last[1], last[0] * last[2]
        if region.products[0].experts and not self.step.config.model.expert_capacity:
            return self._blocks(region)
        if region.attends and linear:
            return self._wide * 2 * (produced + consumed) + self._chunks()
        if region.attends:
            return self._wide * 2 * (produced + consumed) + self._scores() + self._gathered_keys()
        return self._wide * (produced + 2 * consumed + result)

    def _chunks(self) -> int:
        """Linear attention's backward: the arrays of a segment's chunks (`core/models/delta_chunks.py`) with their
        gradients, and the other tokens' queries, keys and values with theirs."""
        model, (rows, length, _) = self.step.config.model, self.step.whole
        pieces = 2 if self.step.way == "gather" else 1
        key, value, chunk = model.linear_key_size, model.linear_value_size, min(model.linear_chunk, length // pieces)
        heads, segment = rows * model.linear_heads // self.step.config.mesh.tensor, min(4 * chunk * pieces, length)
        of_segment = segment * (8 * key + 5 * value + 6 * chunk)
        return 2 * self.step.wide * heads * (of_segment + (length - segment) * (2 * key + value))

    def _blocks(self, region: Region) -> int:
        """Backward through products of experts in blocks (`core/models/grouped.py`), for the rows of the whole expert
        group: the first products' results and the last one's input twice, with their gradients; the rows, and their
        results before and after reordering; for every weight the gradient, and in a loop a transposed copy, the sum and
        a turn's copies of weights, or the fp32 gradients."""
        experts, rows = region.products[0].experts, region.products[0].dims.shape(self._rows)[0]
        rows = rows * self.step.config.mesh.expert + experts * self.backend.expert_block
        (_, hidden, produced), (_, consumed, _) = (region.products[index].dims.fixed for index in (0, -1))
        weights, weight = experts * hidden * (produced + consumed), self._wide * hidden * produced
        dtype = COMPUTE_DTYPE[self.step.config.precision]
        if self.backend.expert_kernel and kernels_can(dtype, self.backend.expert_block, hidden, consumed):
            return self._wide * (rows * (2 * produced + 2 * consumed + 5 * hidden) + weights)
        at_once = min(self.backend.blocks_at_once(weight), rows // self.backend.expert_block)
        copies = 2 * at_once * weight if at_once > 1 else 0
        return self._wide * (rows * (2 * produced + 2 * consumed + 5 * hidden) + 3 * weights) + copies

    def _gathered_keys(self) -> int:
        """Keys and values that a device gathers, and the sums of their gradients."""
        step = self.step
        model = step.config.model
        numbers = step.rows * step.tokens * step.attention_kv_heads * (model.head_size + model.value_head_size)
        return numbers * (2 * self._wide + step.wide) if step.way == "gather" else 0

    def _scores(self) -> int:
        """Scores, probabilities and their gradients of as many heads as are computed at once, of all blocks of queries:
        these are unrolled, and XLA runs them in any order."""
        step = self.step
        if self.cost.layer.fused or (self.backend.fused_attention and step.config.model.attention == "kernel"):
            return 0
        group, heads = step.attention_heads // step.attention_kv_heads, step.rows * step.attention_kv_heads
        heads = heads_at_once(heads, group, step.queries, step.wide, self.backend)
        return 3 * heads * group * step.scores_of_head(self.backend)[1] * step.wide
