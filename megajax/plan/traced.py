"""What a layer and the ends of a model save, compute and send on a device, found by tracing the program's own functions
on a mesh without devices, once per case. How often each runs in a step is arithmetic.

The number of rows in a microbatch is a name (`jax.export.symbolic_shape`), in which all sizes are linear. A layer is
traced with deferred weight gradients, so that they are separate (LoRA has none), and with attention in the largest
possible blocks of queries: neither changes what is saved, computed or sent.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, TypeVar

import jax
from jax.export import symbolic_shape
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from megajax.core.axes import EXPERT, ROW_AXES, TENSOR
from megajax.core.backend import Backend
from megajax.core.mesh import RULES
from megajax.core.models.staged import StagedModel
from megajax.core.models.turns import ALL
from megajax.core.optim.config import OptimizerConfig
from megajax.core.parallel.collectives import PIPE, vary
from megajax.core.pipeline.buffers import idle
from megajax.core.pipeline.config import PipelineConfig
from megajax.core.pipeline.executor import Pipeline
from megajax.core.pipeline.rows import End, Row, Work
from megajax.core.pipeline.stages import Layers
from megajax.core.precision import E4M3
from megajax.core.private import FUSED_FORWARD
from megajax.core.program.bind import trace_pipeline
from megajax.core.program.communication import COLLECTIVES, collectives_of, equations
from megajax.core.program.program import Program, training_way
from megajax.core.program.weight import Shape
from megajax.data.config import DataConfig
from megajax.plan import h200
from megajax.plan.costs import Dims, EndsCost, Kept, LayerCost, Operand, Product, Region, Sent, StepCost
from megajax.settings.config import Config, TrainConfig

Cost = TypeVar("Cost", LayerCost, EndsCost)
_ROWS: Any = symbolic_shape("rows")[0]
_LARGEST_BLOCK = 2**30
_ENDS = "all-reduce", "reduce-scatter"  # of a region; a maximum is no sum
_OF_ROWS_ALONE = [axis for axis in ROW_AXES if axis not in RULES.values()]  # no weight is sharded over them


@lru_cache(maxsize=4)
def _program(config: Config, backend: Backend, together: bool) -> Program:
    program = Program.abstract(config, backend)
    boundary = replace(program.model.boundary, together=together)
    program.model = StagedModel(config.model, boundary, program.backend, config.lora)
    return program


def step_cost(config: Config, backend: Backend, *, scaled: bool = False) -> StepCost:
    """The costs of a configuration on a kind of device. With `scaled`, those of a larger `tensor` or `expert` axis are
    computed from two smaller ones', which a search traces anyway."""
    backend = replace(backend, expert_kernel=False)  # a trace does not depend on it, and GPUs share one
    of_ends = config.model.dense_layers + config.model.num_predicting  # layers that the ends have
    gathers_once = of_ends and config.train.remat == "layer"  # inputs of these layers' regions
    gather = replace(config.model, context_attention="gather")
    alike = config if of_ends else replace(config, model=gather)  # without layers every way is the same
    if not config.model.num_predicting:  # no experts
        alike = replace(alike, mesh=replace(config.mesh, expert=1))
    first = _one_microbatch(alike, "layer" if gathers_once else "none", config.splits_vocabulary)
    found = _scaled if scaled else _traced
    ends = found(first, backend, _ends_cost, _permutes(config))

    def of(kind: str, remat: str) -> LayerCost:
        return layer_cost(config, backend, remat, kind, scaled)

    runs = config.model.periods.items()
    return StepCost({kind: (max(own), of(kind, config.train.remat), of(kind, "none")) for kind, own in runs}, ends)


def layer_cost(config: Config, backend: Backend, remat: str, kind: str = "", scaled: bool = False) -> LayerCost:
    """A layer of a kind in a configuration on a kind of device, recomputing what `remat` says. Of a stage that is
    recomputed as a whole, layers recompute nothing."""
    if config.model.linear_heads:
        alike = replace(config.model, linear_layers=ALL if config.model.is_linear(kind) else "0,1")
        config = replace(config, model=alike)
    like = _one_microbatch(config, "none" if remat == "stage" else remat)
    return (_scaled if scaled else _traced)(like, backend, _layer_cost, _permutes(config))


def _permutes(config: Config) -> bool:
    """Whether attention sends keys by a permute, although the traced program has a pipeline."""
    return config.mesh.pipe == 1 and training_way(config) == "window"


def _coarse(backend: Backend) -> Backend:
    """With the largest blocks, and without our own kernels, whose sizes must be numbers."""
    backend = replace(backend.without("kernel"), query_block=_LARGEST_BLOCK, scores_bytes=None)
    return replace(backend, expert_block=1, expert_kernel=False, expert_bytes=0)


def _one_microbatch(config: Config, remat: Any, splits_vocabulary: bool = False) -> Config:
    """The smallest run with the same layers and ends, which many configurations have in common."""
    pipe = config.mesh.pipe if splits_vocabulary else 2
    if (way := training_way(config)) != "none":  # with another pipe and remat `auto` could take another one
        model = replace(config.model, context_attention="heads" if way == "heads" else "gather")
        config = replace(config, model=model)
    mesh = replace(config.mesh, pipe=pipe, **dict.fromkeys(_OF_ROWS_ALONE, 1))
    return Config(
        precision=config.precision,
        sequence_parallel=config.sequence_parallel,
        model=replace(
            config.model,
            num_layers=pipe + config.model.dense_layers,
            scan_layers="true",
            bf16_layers="0,0",
            # Our own kernel sends and saves the same as blocks.
            attention="blocks" if config.model.attention == "kernel" else config.model.attention,
        ),
        lora=config.lora,
        mesh=mesh,
        pipeline=PipelineConfig(vocabulary="split" if splits_vocabulary else "replicated", weight_gradients="deferred"),
        train=TrainConfig(global_batch=_ROWS * mesh.row_shards, microbatch=_ROWS, remat=remat),
        optimizer=OptimizerConfig(learning_rate=1.0, zero=0, gradient_dtype=config.optimizer.gradient_dtype),
        data=DataConfig(reset_attention=config.data.reset_attention),
    )


class _Blocks(NamedTuple):
    """How dropless experts group rows into blocks (`core/models/grouped.py`), which are traced with one row each."""

    experts: int  # on a device, each with one block that need not be full; 0: there are no blocks
    rows: int  # of a block in the real program
    chosen: int  # experts on a device that the tokens of one row choose

    @classmethod
    def from_config(cls, config: Config, backend: Backend) -> "_Blocks":
        """Those of a configuration's layers."""
        model = config.model
        if not model.num_experts or model.expert_capacity:
            return cls(0, 1, 0)
        shared_by = config.mesh.context if training_way(config) != "none" else 1
        chosen = model.sequence_length // shared_by * model.experts_per_token
        return cls(model.num_experts // config.mesh.expert, backend.expert_block, chosen)


@lru_cache(maxsize=1024)
def _traced(config: Config, backend: Backend, look: Callable[[Pipeline, _Blocks], Cost], together: bool) -> Cost:
    """What `look` finds in the traced loop of a train step."""
    with jax.enable_x64(config.precision == "fp64"), h200.attention():
        program = _program(config, _coarse(backend), together)
        blocks = _Blocks.from_config(config, backend)
        return trace_pipeline(program, lambda pipeline: look(pipeline, blocks))


@lru_cache(maxsize=1024)
def _scaled(config: Config, backend: Backend, look: Callable[[Pipeline, _Blocks], Cost], together: bool) -> Cost:
    """The same as `_traced`. Every number of it is a part that all devices of an axis have, plus one that they divide
    or that grows with them; two sizes of the axis tell. The axis is `tensor`, if devices share keys' heads evenly,
    `expert`, or `pipe` where the vocabulary is split."""
    mesh, model = config.mesh, config.model
    least = 2 if config.sequence_parallel else 1  # with 1 there is nothing to split
    shares = model.num_kv_heads % (mesh.tensor * (mesh.context if training_way(config) == "heads" else 1)) == 0
    shares = shares and not model.whole_heads(mesh.tensor)
    for axis, first in ((TENSOR, least if shares else mesh.tensor), (PIPE, 2), (EXPERT, 2)):
        times, rest = divmod(getattr(mesh, axis), first)
        if times > 2 and times % 2 == 0 and not rest:
            one, two = (_scaled(_with_axis(config, axis, each), backend, look, together) for each in (first, 2 * first))
            with contextlib.suppress(_Unlike):
                return _extrapolated(one, two, times)
    return _traced(config, backend, look, together)


def _with_axis(config: Config, axis: str, size: int) -> Config:
    """A traced run with another size of an axis, and one layer for each stage as before."""
    mesh, model = replace(config.mesh, **{axis: size}), config.model
    model = replace(model, num_layers=model.num_layers + mesh.pipe - config.mesh.pipe)
    batch = replace(config.train, global_batch=_ROWS * mesh.row_shards)
    return replace(config, mesh=mesh, model=model, train=batch)


class _Unlike(Exception):
    """Two costs differ in more than numbers."""


def _extrapolated(one: Any, two: Any, times: int) -> Any:
    """What becomes of `one`, and of `two` on twice as many devices, on this many times as many."""
    if type(one) is not type(two):
        raise _Unlike
    if isinstance(one, tuple) and len(one) == len(two):
        return tuple(_extrapolated(first, second, times) for first, second in zip(one, two, strict=True))
    if is_dataclass(one) and not isinstance(one, type):
        names = [each.name for each in fields(one)]
        return type(one)(*(_extrapolated(getattr(one, name), getattr(two, name), times) for name in names))
    if isinstance(one, int) and not isinstance(one, bool):  # what is divided has halved in `two`
        found = one + (two - one) * (times - 1 if two > one else 2 - Fraction(2, times))
        if found.denominator == 1 and found >= 0:
            return int(found)
    elif one == two:
        return one
    raise _Unlike


def _dims(shape: Shape, blocks: _Blocks) -> Dims:
    """The dims of an array that has this shape in the trace. One more block for each expert is that many more rows."""
    none, one = _shape_of(str(shape), 0), _shape_of(str(shape), 1)
    of_row = tuple(more - dim for dim, more in zip(none, one, strict=True))
    return Dims(tuple(dim * blocks.rows if each else dim for dim, each in zip(none, of_row, strict=True)), of_row)


@lru_cache(maxsize=65536)
def _shape_of(shape: str, rows: int) -> Shape:
    return tuple(map(int, symbolic_shape(shape, constraints=[f"{_ROWS} == {rows}"])))


def _layer_cost(pipeline: Pipeline, blocks: _Blocks) -> LayerCost:
    layers, x_BTD = pipeline.layers, idle(pipeline.x_type)
    assert isinstance(layers, Layers)
    context = vary(pipeline.ends.take(0).context, (PIPE,))
    sums = pipeline.sums(1)
    forward, (output, residuals) = jax.make_jaxpr(
        lambda x, context: layers.forward_with_residuals(0, x, context), return_shape=True
    )(x_BTD, context)
    backward = jax.make_jaxpr(lambda residuals, grad, context: layers.pull_back(0, residuals, context, grad, sums))(
        idle(residuals), x_BTD, context
    )
    later = jax.make_jaxpr(lambda sums: layers.add_weight_gradients(0, sums, 0) if layers.deferred else sums)(sums)
    return LayerCost(
        Kept(tuple(_operand(var.aval, blocks) for var in _residuals(forward.jaxpr, len(jax.tree.leaves(output))))),
        Kept(tuple(_operand(leaf, blocks, leading=2) for leaf in jax.tree.leaves(sums.factors))),
        tuple(_regions(forward.jaxpr, backward.jaxpr, blocks)),
        any(_is_fused_attention(eqn) for eqn, _ in equations(forward.jaxpr)),
        *(_sent(traced, blocks) for traced in (forward, backward, later)),
    )


def _ends_cost(pipeline: Pipeline, blocks: _Blocks) -> EndsCost:
    ends, totals, x_BTD = pipeline.ends, pipeline.totals(), idle(pipeline.x_type)
    work, end = Work(True, 0, 0, 0, 0, 0), End(here=True, anywhere=True, microbatch=0)
    row = Row(work, work, end, end, end, end)
    embedding = jax.make_jaxpr(lambda x: ends.input(row, x))(x_BTD)
    head = jax.make_jaxpr(lambda x, totals: ends.head(row, x, None, x, totals))(x_BTD, totals)
    backward = jax.make_jaxpr(lambda x, sums: ends.embed_backward(row, x, sums))(x_BTD, totals.sums)
    return EndsCost(
        tuple(_product(eqn, blocks).dims for eqn, _ in equations(head.jaxpr) if _multiplies_weights(eqn)),
        *(_sent(traced, blocks) for traced in (embedding, head, backward)),
    )


def _residuals(forward: Jaxpr, num_outputs: int) -> list:
    """The residuals of a scan over one layer, each once, even if `jax.checkpoint` saves one under two names."""
    (scan,) = (eqn for eqn in forward.eqns if eqn.primitive.name == "scan")
    inside: Jaxpr = scan.params["jaxpr"].jaxpr
    same: dict[Any, Any] = dict(zip(scan.outvars, inside.outvars, strict=True))
    for eqn in inside.eqns:
        if eqn.primitive.name in ("name", "reduce_precision"):
            same[eqn.outvars[0]] = same.get(eqn.invars[0], eqn.invars[0])
    saved = (same.get(var, var) for var in forward.outvars[num_outputs:])
    return list(dict.fromkeys(same.get(var, var) for var in saved))


def _operand(type_: Any, blocks: _Blocks, leading: int = 0) -> Operand:
    return Operand(_dims(type_.shape[leading:], blocks), type_.dtype.itemsize)


def _sent(traced: ClosedJaxpr, blocks: _Blocks) -> tuple[Sent, ...]:
    sent = []
    for op in collectives_of(traced):
        item = op.num_bytes // max(1, sum(map(prod, op.shapes)))
        sent += [Sent(op.kind, op.axes, Operand(_dims(s, blocks), item), op.count) for s in op.shapes]
    return tuple(sent)


def _regions(forward: Jaxpr, backward: Jaxpr, blocks: _Blocks) -> Iterator[Region]:
    """The regions of the forward pass, each up to the sum that ends it, or to the first product of experts."""
    repeated = Counter(_signature(eqn) for eqn, _ in equations(backward) if _multiplies_weights(eqn))
    for eqn, _ in equations(forward):  # the gradient of an input may be a product as another's, turned
        if _multiplies_weights(eqn) and (_is_block(eqn, blocks) or _in_float8(eqn)):
            repeated[_turned(eqn)] -= 1
    products: dict[Any, Product] = {}  # by their left operand, and whether they are computed again
    attends = False
    for eqn, _ in equations(forward):
        if _multiplies_weights(eqn):
            again = repeated[_signature(eqn)] > 0
            repeated[_signature(eqn)] -= again
            new, left = _product(eqn, blocks), tuple(_operand_shapes(eqn)) if _is_block(eqn, blocks) else eqn.invars[0]
            if new.experts and not all(product.experts for product in products.values()):
                yield Region(tuple(products.values()), attends)
                products, attends = {}, False
            before = products.get((left, again))
            columns = new.dims.fixed[2] + (before.dims.fixed[2] if before else 0)
            dims = replace(new.dims, fixed=(*new.dims.fixed[:2], columns))
            products[left, again] = replace(new, dims=dims, again=again, weights=before.weights + 1 if before else 1)
        elif _is_fused_attention(eqn) or _scores(eqn):
            attends = True
        elif eqn.primitive.name != "pmax" and COLLECTIVES.get(eqn.primitive.name) in _ENDS and products:
            yield Region(tuple(products.values()), attends)
            products, attends = {}, False


def _is_fused_attention(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name.startswith(FUSED_FORWARD)


def _multiplies_weights(eqn: JaxprEqn) -> bool:
    """Whether it is a product with weights: its operands have no common dim besides the inner one, unlike in attention;
    or it is a product of experts, whose weights do not depend on rows."""
    if eqn.primitive.name != "dot_general":
        return False
    of_rows = [any(not isinstance(dim, int) for dim in shape) for shape in _operand_shapes(eqn)]
    return not eqn.params["dimension_numbers"][1][0] or not all(of_rows)


def _scores(eqn: JaxprEqn) -> bool:
    """Whether it is a product as in attention, in which both operands have a dim of their own."""
    if eqn.primitive.name != "dot_general":
        return False
    inner, batch = eqn.params["dimension_numbers"]
    return all(len(shape) > len(inner[0]) + len(batch[0]) for shape in _operand_shapes(eqn))


def _signature(eqn: JaxprEqn) -> Any:
    return *_operand_shapes(eqn), eqn.params["dimension_numbers"]


def _turned(eqn: JaxprEqn) -> Any:
    """The signature of the product of an output's gradient with the weight. In 8 bits, the dims that a product sums
    over are last in the weight's copies."""
    left, right = _operand_shapes(eqn)
    numbers = eqn.params["dimension_numbers"]
    if not _in_float8(eqn):  # of a block
        return (1, right[1]), right[::-1], numbers
    (inner, _), (batch, _) = numbers
    first, summed, stacked = left[: len(left) - len(inner)], len(inner), len(batch)
    outer, of_inner = right[stacked : len(right) - summed], right[len(right) - summed :]

    def last(shape: Shape) -> tuple[int, ...]:
        return tuple(range(len(shape) - len(outer), len(shape)))

    grad, weight = (*first, *outer), (*right[:stacked], *of_inner, *outer)
    return grad, weight, ((last(grad), last(weight)), numbers[1])


def _in_float8(eqn: JaxprEqn) -> bool:
    left: Any = eqn.invars[0].aval
    return left.dtype == E4M3


def _operand_shapes(eqn: JaxprEqn) -> list[Shape]:
    avals: list[Any] = [var.aval for var in eqn.invars]
    return [aval.shape for aval in avals]


def _product(eqn: JaxprEqn, blocks: _Blocks) -> Product:
    """Rows, inner dim and columns. With blocks, a device has the rows of its expert group but computes only its share:
    as many as there are choices by tokens on a device."""
    left, right = _operand_shapes(eqn)
    if _is_block(eqn, blocks):
        inner, columns = right[:-3:-1] if _in_float8(eqn) else right
        return Product(Dims((0, inner, columns), (blocks.chosen, 0, 0)), experts=blocks.experts)
    (inner_dims, _), (batch_dims, _) = eqn.params["dimension_numbers"]
    inner, batch = prod(left[dim] for dim in inner_dims), prod(left[dim] for dim in batch_dims)
    dims = _dims((prod(left) // inner, inner, prod(right) // inner // batch), blocks)
    return Product(dims, experts=batch if batch_dims else 0)


def _is_block(eqn: JaxprEqn, blocks: _Blocks) -> bool:
    """Whether it is the product of one block of rows with its expert's weight, in a loop over blocks."""
    left, right = _operand_shapes(eqn)
    (_, summed), (_, batch) = eqn.params["dimension_numbers"]
    one_row = (*[1] * (len(left) - 1), right[summed[0]])
    return blocks.experts > 0 and len(right) == 2 + len(batch) and left == one_row
