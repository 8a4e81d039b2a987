"""Which fused implementations can compute a program's attention, and what a run compares of them and of the experts'
kernels before its first step. Which of them is used is the rule of `core/backend.py`.

Letters: B batch, T queries, S keys, H heads, of keys and values maybe fewer, K head size; N choices of experts by
tokens, R rows of blocks, D model, F MLP, E experts.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from megajax.core.backend import BLOCKS, Backend
from megajax.core.config import StepConfig
from megajax.core.errors import UserError
from megajax.core.mesh import make_abstract_mesh, make_mesh
from megajax.core.models.attend import IMPLEMENTATIONS, attend, can_attend
from megajax.core.models.attention import ATTENTION_WEIGHTS
from megajax.core.models.attention_mask import FROM_START, Pieces, Places
from megajax.core.models.attention_setting import Setting
from megajax.core.models.grouped import GroupRule, in_blocks, kernels_can
from megajax.core.models.staged import StagedModel
from megajax.core.parallel.boundary import F_AND_G
from megajax.core.parallel.collectives import TENSOR
from megajax.core.parallel.products import products
from megajax.core.parallel.random import Dropout
from megajax.core.precision import COMPUTE_DTYPE
from megajax.core.private import has_gpu_kernels
from megajax.core.program.program import Program, training_way
from megajax.data.synthetic import random_batch
from megajax.start.form_comparison import Compute, FormComparison

_ROWS, _TOKENS = 2, 512  # of the small attention, beside the rest of the program's tokens that fills no block:
_BLOCK = 128  # kernels treat that apart
_EXPERTS, _CHOICES, _WIDTH = 4, 1024, 512
_HEADS, _EVERYWHERE = PartitionSpec(None, None, TENSOR), PartitionSpec()


def comparisons(program: Program) -> list[FormComparison]:
    """What is compared before a training: none on CPUs, nor of attention that `--model.attention` asks for by name."""
    config, backend = program.config, program.backend
    compared = []
    if config.model.attention == "auto" and backend.fused_attention:
        windowed = config.model.windowed
        layer = windowed.index(True) if any(windowed) else 0
        training, evaluation = (SmallAttention(each, backend, layer) for each in (config, without_dropout(config)))
        able = training.able()
        others = [name for name in evaluation.able() if name not in able]
        compared = [training.comparison("attention", able)]
        compared += [evaluation.comparison("attention without dropout", others)]
    if config.model.num_experts and backend.expert_kernel:
        compared.append(experts_comparison(config, backend))
    return [comparison for comparison in compared if comparison.forms]


def without_dropout(config: StepConfig) -> StepConfig:
    """The configuration as evaluations compute it."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0))


class SmallAttention:
    """Attention of a layer as one device computes it, of two short sequences: with the configuration's precision, head
    sizes, heads per key head, masks, dropout and sinks. No `layer`: one whose number is not known while tracing."""

    def __init__(self, config: StepConfig, backend: Backend, layer: int | None = None):
        model = config.model
        length, window = min(model.sequence_length, _TOKENS + model.sequence_length % _BLOCK), model.sliding_window
        if window < model.sequence_length:
            window = min(window, length // 2)
        self.model = dataclasses.replace(model, sequence_length=length, sliding_window=window)
        train = dataclasses.replace(config.train, global_batch=_ROWS)
        self.batch = random_batch(dataclasses.replace(config, model=self.model, train=train), 0)
        self.backend, self.layer, self.seed = backend, layer, config.seed
        self.dtype = COMPUTE_DTYPE[config.precision]
        # The first and the last quarter of the queries: kernels must not take a query's index for its position.
        self.quarters = training_way(config) in ("gather", "window")
        self._layers = StagedModel(self.model, F_AND_G, backend)
        sequences, queries = self.batch["tokens"].size // length, 2 * (length // 4) if self.quarters else length
        kv_heads = min(2, model.num_kv_heads)
        heads = kv_heads * model.num_heads // model.num_kv_heads
        self.queries = (sequences, queries, heads, model.head_size)
        self.keys = (sequences, length, kv_heads, model.head_size)
        self.what = f"{sequences} x {queries} tokens, {heads} heads of {model.head_size}, {config.precision}"
        self.what += f", dropout {model.dropout:g}" if model.dropout else ""
        self.what += f", a window of {window}" if any(self.model.windowed) else ""
        self.what += ", documents" if config.data.reset_attention else ""

    def setting(self, batch: Any, backend: Backend) -> Setting:
        """What attention depends on besides queries, keys and values."""
        dropout = Dropout.at(self.model.dropout, self.seed, jnp.int32(0), jnp.arange(_ROWS, dtype=jnp.int32))
        layer = jnp.int32(0) if self.layer is None else self.layer
        context = self._layers.context(batch, dropout).in_layer(layer, self.model.windowed)
        visible, places = context.visible, FROM_START
        if self.quarters:
            quarter, length = self.queries[1] // 2, self.keys[1]
            places = Places(Pieces(jnp.asarray([0, length - quarter], jnp.int32)))
            visible = visible.of_queries(lambda x_BT: jnp.concatenate([x_BT[:, :quarter], x_BT[:, -quarter:]], axis=1))
        sink_H = jnp.zeros(self.queries[2:3], self.dtype) if self.model.attention_sinks else None
        return Setting(visible, context.dropout.fold(ATTENTION_WEIGHTS), backend, places, sink_H=sink_H)

    def able(self) -> list[str]:
        """The implementations that can compute this attention."""
        names: list[str] = []

        def look(batch: Any) -> Array:
            setting, q_BTHK = self.setting(batch, self.backend), jnp.zeros(self.queries, self.dtype)
            values = self.model.value_head_size
            names.extend(name for name in IMPLEMENTATIONS if can_attend(name, q_BTHK, values, setting))
            return jnp.zeros(())

        jax.eval_shape(_alone(look, mesh=make_abstract_mesh()), self.batch)
        return names

    def comparison(self, name: str, able: Sequence[str]) -> FormComparison:
        """Of those fused implementations of the backend that are `able`."""
        fused = [form for form in self.backend.attention if form in able and form not in BLOCKS]

        def function(backend: Backend) -> Compute:
            def both(batch: Any, q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, grad_BTHK: Array) -> tuple[Array, ...]:
                setting = self.setting(batch, backend)
                y_BTHK, pull = jax.vjp(lambda q, k, v: attend(q, k, v, setting), q_BTHK, k_BSHK, v_BSHK)
                return y_BTHK, *pull(grad_BTHK)

            # Heads count as sharded over `tensor`, on whose places their dropout depends.
            alone = _alone(both, (_EVERYWHERE, *[_HEADS] * 4), _HEADS)
            return lambda q, k, v, grad, *batch: alone(dict(zip(self.batch, batch, strict=True)), q, k, v, grad)

        values, grads = ((*shape[:3], self.model.value_head_size) for shape in (self.keys, self.queries))
        return FormComparison(
            name,
            self.what,
            ["the heads", *(f"the gradient of the {each}" for each in ("queries", "keys", "values"))],
            {form: dataclasses.replace(self.backend, attention=(form, *BLOCKS)) for form in fused},
            dataclasses.replace(self.backend, attention=BLOCKS),
            function,
            lambda: [*_random(self.dtype, self.queries, self.keys, values, grads), *self.batch.values()],
        )


def experts_comparison(config: StepConfig, backend: Backend) -> FormComparison:
    """Of the kernels with a loop, of the two products of a few experts without capacity, the first without a token;
    without forms where kernels cannot multiply such widths."""
    widths = config.model.hidden_size, config.model.expert_size // config.mesh.tensor
    dtype, block = COMPUTE_DTYPE[config.precision], backend.expert_block
    can = backend.expert_kernel and has_gpu_kernels() and kernels_can(dtype, block, *widths)
    hidden, inner = (min(width, _WIDTH) for width in widths)

    def function(backend: Backend) -> Compute:
        def both(x_ND: Array, in_EDF: Array, out_EFD: Array, grad_ND: Array, expert_N: Array) -> list[Array]:
            blocks, place_N = in_blocks(expert_N, _EXPERTS, block, by_kernel=backend.expert_kernel)

            def multiply(x_ND: Array, in_EDF: Array, out_EFD: Array) -> Array:
                rows_RD = jnp.zeros((blocks.group_MG.size * block, hidden), x_ND.dtype)
                rows_RD = rows_RD.at[place_N].set(x_ND, mode="drop")
                for weight in (in_EDF, out_EFD):
                    (rows_RD,) = products(GroupRule(_EXPERTS), rows_RD, [weight], blocks)
                return rows_RD.at[place_N].get(mode="fill", fill_value=0)

            y_ND, pull = jax.vjp(multiply, x_ND, in_EDF, out_EFD)
            return [y_ND, *pull(grad_ND)]

        return _alone(both)

    expert_N = np.random.default_rng(0).integers(1, _EXPERTS + 1, _CHOICES, np.int32)  # the last one is not here
    shapes = (_CHOICES, hidden), (_EXPERTS, hidden, inner), (_EXPERTS, inner, hidden), (_CHOICES, hidden)
    return FormComparison(
        "experts",
        f"{_CHOICES} choices of {_EXPERTS} experts, {hidden} x {inner} x {hidden}",
        ["the output", *(f"the gradient of the {each}" for each in ("input", "first weights", "second weights"))],
        {"kernel": backend} if can else {},
        dataclasses.replace(backend, expert_kernel=False),
        function,
        lambda: [*_random(dtype, *shapes), expert_N],
    )


def _random(dtype: Any, *shapes: tuple[int, ...]) -> list[Array]:
    """Random arrays; weights, which have three dims, are scaled so that products with them have variance 1."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    scales = [shape[1] ** -0.5 if len(shape) == 3 else 1.0 for shape in shapes]
    drawn = [scale * jax.random.normal(key, shape) for key, shape, scale in zip(keys, shapes, scales, strict=True)]
    return [x.astype(dtype) for x in jax.device_put(drawn, jax.local_devices()[0])]


def _alone(function: Callable, in_specs: Any = _EVERYWHERE, out_specs: Any = _EVERYWHERE, mesh: Any = None) -> Callable:
    """`function` on a mesh of this process's first device: attention and products find the axes that they name."""
    mesh = mesh or make_mesh(jax.local_devices()[:1])
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)


def check_attention(program: Program) -> None:
    """Check that the implementation that `--model.attention` asks for can compute the run's attention."""
    if why := cannot_attend(program):
        raise UserError("; valid: ".join(why))


def cannot_attend(program: Program, *, training: bool = True) -> tuple[str, str] | None:
    """Why the implementation that `--model.attention` asks for cannot compute a program's attention, or that of an
    evaluation, without dropout; and which ones can. None if it can, or if none is asked for."""
    config, asked = program.config, program.config.model.attention
    if asked in ("auto", "blocks"):
        return None
    without_cudnn = config.deterministic and asked == "cudnn"  # then no fused attention may be left
    if not program.backend.fused_attention and not without_cudnn:
        return f"--model.attention {asked}: there is none for these devices", "auto, blocks"
    config = config if training else without_dropout(config)
    able = SmallAttention(config, program.backend).able()
    if without_cudnn:
        others = (each for each in able if each != asked)
        return "--model.attention cudnn: it fails with --deterministic", ", ".join(["auto", *others])
    if asked in able:
        return None
    has = [f"--precision {config.precision}", f"--model.head-size {config.model.head_size}"]
    larger = config.model.value_head_size > config.model.head_size
    has += [f"--model.value-size {config.model.value_size}"] if larger else []
    has += [f"--model.dropout {config.model.dropout:g}"] if config.model.dropout else []
    has += ["--data.reset-attention"] if config.data.reset_attention else []
    has += [f"--model.sliding-window {config.model.sliding_window}"] if config.model.sliding_window else []
    has += ["--model.attention-sinks"] if config.model.attention_sinks else []
    has += [f"--model.scores {config.model.scores}"] if config.model.scores != "plain" else []
    has += [f"--mesh.context {config.mesh.context}"] if config.mesh.context > 1 else []
    too_old = asked == "kernel" and not has_gpu_kernels()
    old = f" with JAX {jax.__version__}, which has no such kernels" if too_old else ""
    return f"--model.attention {asked} cannot do {', '.join(has)}{old}", ", ".join(["auto", *able])
