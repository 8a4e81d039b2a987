"""What a run on GPUs measures before it starts (`program/measured.py`): attention, experts and weight gradients of one
layer, on one device, with the shapes that a device has, and the run's masks and dropout.

Letters: B batch, T queries, S keys, H heads, of keys and values maybe fewer, K head size; N tokens, or choices of
experts by tokens, D model, F MLP, E experts.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from megajax.core.backend import BLOCKS, Backend
from megajax.core.errors import UserError
from megajax.core.mesh import make_abstract_mesh, make_mesh
from megajax.core.models.attend import IMPLEMENTATIONS, attend, can_attend
from megajax.core.models.attention import ATTENTION_WEIGHTS
from megajax.core.models.attention_mask import FROM_START, AttentionMask, Pieces, Places
from megajax.core.models.attention_setting import Setting
from megajax.core.models.context_attention import copies
from megajax.core.models.grouped import grouped_product, in_blocks, kernels_can
from megajax.core.models.staged import StagedModel
from megajax.core.parallel.boundary import F_AND_G
from megajax.core.parallel.collectives import TENSOR
from megajax.core.parallel.products import product
from megajax.core.parallel.random import Dropout
from megajax.core.private import has_gpu_kernels
from megajax.core.program.measured import Compute, FormQuestion
from megajax.core.program.program import Program

Batch = Mapping[str, np.ndarray]
Forms = Mapping[str, Mapping[str, Any]]  # by name: fields of the backend
_LARGEST_BLOCK = 2048  # queries of the reference's blocks; fewer blocks compile faster
_SCORES = 2**28  # bytes of its scores at once
_HEADS, _EVERYWHERE = PartitionSpec(None, None, TENSOR), PartitionSpec()


class OneLayer:
    """A layer of a program on one of its devices. `batch` has the rows of a microbatch."""

    def __init__(self, program: Program, batch: Batch):
        config = program.config
        self.program, self.model, self.batch = program, config.model, batch
        self.way, self.context = program.model.boundary.context, config.mesh.context
        self.dtype = program.layout.compute_dtype
        self.rows, self.length = prod(batch["tokens"].shape[:-1]), batch["tokens"].shape[-1]
        tensor, shared = config.mesh.tensor, self.context if self.way == "heads" else 1
        keys = max(1, self.model.num_kv_heads // tensor)
        self.heads, self.kv_heads = self.model.num_heads // tensor // shared, keys * copies(keys, shared) // shared
        # Inside, nothing of this is sharded: it is what one device computes.
        self._layers = StagedModel(config.model, F_AND_G, program.backend, config.lora)

    def setting(self, batch: Any, backend: Backend) -> Setting:
        """What attention depends on beside queries, keys and values; in a context group, on one device."""
        row_B = jnp.arange(next(iter(batch.values())).shape[0], dtype=jnp.int32)
        dropout = Dropout.at(self.model.dropout, self.program.config.seed, jnp.zeros((), jnp.int32), row_B)
        context = self._layers.context(batch, dropout).in_layer(jnp.zeros((), jnp.int32), self.model.windowed)
        places, own, tokens = FROM_START, self.num_queries, [slice(None)]
        if self.way == "gather":  # the first device's, from the front and from the back
            piece = own // 2
            starts = (0, self.length - piece)
            places, tokens = Places(Pieces(starts)), [slice(start, start + piece) for start in starts]
        elif self.way == "window":
            start = jnp.asarray([self.length - own], jnp.int32)
            places, tokens = Places.with_keys_before(start, self.num_keys - own), [slice(self.length - own, None)]
        visible = context.visible.of_queries(lambda x_BT: jnp.concatenate([x_BT[:, each] for each in tokens], axis=1))
        sink_H = jnp.zeros((self.heads,), self.dtype) if self.model.attention_sinks else None
        return Setting(visible, context.dropout.fold(ATTENTION_WEIGHTS), backend, places, sink_H=sink_H)

    @property
    def num_queries(self) -> int:
        """Of this device."""
        return self.length // self.context if self.way in ("gather", "window") else self.length

    @property
    def num_keys(self) -> int:
        """Of the keys that these queries may see."""
        before = AttentionMask.of_model(self.model, self.length).before
        return self.num_queries + before if self.way == "window" and before is not None else self.length

    def attention(self, forms: Forms) -> FormQuestion:
        """Attention of a layer. Forms that cannot compute it are left out, and so are equal ones."""
        able = self.able()
        backends: dict[str, Backend] = {}
        for name, changes in forms.items():
            backend = dataclasses.replace(self.program.backend, **changes)
            asked = self.model.attention in ("auto", backend.attention[0])
            same = any(self._effect(backend) == self._effect(other) for other in backends.values())
            if asked and not same and backend.attention[0] in able:
                backends[name] = backend

        def function(backend: Backend) -> Compute:
            def both(batch: Any, q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, grad_BTHK: Array) -> tuple[Array, ...]:
                setting = self.setting(batch, backend)
                y_BTHK, pull = jax.vjp(lambda q, k, v: attend(q, k, v, setting), q_BTHK, k_BSHK, v_BSHK)
                return y_BTHK, *pull(grad_BTHK)

            # Heads count as sharded over `tensor`, on whose places their dropout depends.
            alone = _alone(both, (_EVERYWHERE, *[_HEADS] * 4), _HEADS)
            return lambda q, k, v, grad, *batch: alone(dict(zip(self.batch, batch, strict=True)), q, k, v, grad)

        queries, keys = ((self.rows, *each, self.model.head_size) for each in self._shapes)
        values, heads = ((*shape[:3], self.model.value_head_size) for shape in (keys, queries))
        reference = dataclasses.replace(
            self.program.backend, attention=BLOCKS, query_block=_LARGEST_BLOCK, scores_bytes=_SCORES
        )
        what = f"{self.rows} x {self.num_queries} tokens, {self.heads} heads of {self.model.head_size}"
        outputs = ["the heads", *(f"the gradient of the {name}" for name in ("queries", "keys", "values"))]
        inputs = partial(self._random, queries, keys, values, heads, others=tuple(self.batch.values()))
        return FormQuestion(
            "attention", f"{what}, forward and backward", outputs, backends, reference, function, inputs
        )

    @property
    def _shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (self.num_queries, self.heads), (self.num_keys, self.kv_heads)

    def _effect(self, backend: Backend) -> tuple:
        own = backend.attention[0] == "blocks"
        return backend.attention[0], backend.block_of(self.num_queries) if own else None

    def able(self) -> list[str]:
        """The implementations that can compute this attention."""
        q_BTHK = jax.ShapeDtypeStruct((self.rows, *self._shapes[0], self.model.head_size), self.dtype)
        found: list[str] = []

        def look(batch: Any) -> Array:
            setting, x_BTHK = self.setting(batch, self.program.backend), jnp.zeros(q_BTHK.shape, q_BTHK.dtype)
            values = self.model.value_head_size
            found.extend(name for name in IMPLEMENTATIONS if can_attend(name, x_BTHK, values, setting))
            return jnp.zeros(())

        jax.eval_shape(_alone(look, mesh=make_abstract_mesh()), dict(self.batch))
        return found

    def weight_gradients(self, forms: Forms) -> FormQuestion:
        """The two products of a layer's MLP, with all their gradients."""
        backends = {name: dataclasses.replace(self.program.backend, **changes) for name, changes in forms.items()}

        def function(backend: Backend) -> Compute:
            def both(x_ND: Array, in_DF: Array, out_FD: Array, grad_ND: Array) -> tuple[Array, ...]:
                def products(x_ND: Array, in_DF: Array, out_FD: Array) -> Array:
                    return product(product(x_ND, in_DF, 1, backend), out_FD, 1, backend)

                y_ND, pull = jax.vjp(products, x_ND, in_DF, out_FD)
                return y_ND, *pull(grad_ND)

            return _alone(both)

        tokens, hidden = self.rows * self.length // self.context, self.model.hidden_size
        inner = self.model.mlp_size // self.program.config.mesh.tensor
        outputs = [
            "the output",
            *(f"the gradient of the {name}" for name in ("input", "first weight", "second weight")),
        ]
        what = f"{tokens} tokens, {hidden} x {inner} x {hidden}, forward and backward"
        x_ND, in_DF, out_FD = (tokens, hidden), (hidden, inner), (inner, hidden)
        inputs = partial(self._random, x_ND, in_DF, out_FD, x_ND)
        return FormQuestion("weight gradients", what, outputs, backends, self.program.backend, function, inputs)

    def experts(self, forms: Forms) -> FormQuestion:
        """The two products of a mixture without capacity, as an evaluation's always is, with all their gradients; the
        first expert has no token. Only asked where kernels can multiply."""
        config, model, backend = self.program.config, self.model, self.program.backend
        hidden, inner = model.hidden_size, model.expert_size // config.mesh.tensor
        own, tokens = model.num_experts // config.mesh.expert, self.rows * self.length // self.context
        number = tokens * config.mesh.expert * model.experts_per_token
        can = (
            backend.expert_kernel
            and has_gpu_kernels()
            and own
            and kernels_can(self.dtype, backend.expert_block, hidden, inner)
        )
        backends = {name: dataclasses.replace(backend, **changes) for name, changes in forms.items() if can}

        def function(backend: Backend) -> Compute:
            def both(x_ND: Array, in_EDF: Array, out_EFD: Array, grad_ND: Array, group_N: Array) -> list[Array]:
                block, at_once = backend.expert_block, backend.blocks_at_once(in_EDF[0].size * in_EDF.dtype.itemsize)
                blocks, place_N = in_blocks(group_N, own, block, at_once, by_kernel=backend.expert_kernel)

                def in_blocks_of(x_ND: Array) -> Array:
                    nothing_RD = jnp.zeros((blocks.group_MG.size * block, x_ND.shape[1]), x_ND.dtype)
                    return nothing_RD.at[place_N].set(x_ND, mode="drop")

                def products(rows_RD: Array, in_EDF: Array, out_EFD: Array) -> Array:
                    return grouped_product(grouped_product(rows_RD, in_EDF, blocks), out_EFD, blocks)

                y_RD, pull = jax.vjp(products, in_blocks_of(x_ND), in_EDF, out_EFD)
                rows_RD, *weights = pull(in_blocks_of(grad_ND))
                return [*(x_RD.at[place_N].get(mode="fill", fill_value=0) for x_RD in (y_RD, rows_RD)), *weights]

            return _alone(both)

        chosen_N = np.random.default_rng(0).integers(1, max(2, model.num_experts), number, np.int32)
        others = (np.where(chosen_N < own, chosen_N, own).astype(np.int32),)
        outputs = [
            "the output",
            *(f"the gradient of the {name}" for name in ("input", "first weights", "second weights")),
        ]
        what = f"{number} choices of experts, {own} of {hidden} x {inner} x {hidden} here, forward and backward"
        x_ND, in_EDF, out_EFD = (number, hidden), (own, hidden, inner), (own, inner, hidden)
        inputs = partial(self._random, x_ND, in_EDF, out_EFD, x_ND, others=others)
        reference = dataclasses.replace(backend, expert_kernel=False)
        return FormQuestion("experts", what, outputs, backends, reference, function, inputs)

    def questions(self, candidates: Mapping[str, Forms]) -> list[FormQuestion]:
        """The candidates with more than one form here."""
        by_name = {"attention": self.attention, "experts": self.experts, "weight gradients": self.weight_gradients}
        found = [by_name[name](forms) for name, forms in candidates.items()]
        return [question for question in found if len(question.forms) > 1]

    def _random(self, *shapes: Sequence[int], others: tuple[np.ndarray, ...] = ()) -> list[Array]:
        """Random arrays, weights scaled so that products with them have variance 1; then the `others`."""
        keys = jax.random.split(jax.random.key(0), len(shapes))
        drawn = [jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, shapes, strict=True)]
        scales = [
            shape[-2] ** -0.5 if len(shape) < 4 and 0 < n < len(shapes) - 1 else 1 for n, shape in enumerate(shapes)
        ]
        scaled = [(x * scale).astype(self.dtype) for x, scale in zip(drawn, scales, strict=True)]
        return jax.device_put([*scaled, *others], jax.local_devices()[0])


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
    if not training:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model.forward_only, dropout=0.0))
        program = Program(config, program.mesh, program.backend)
    form = program.form.shapes(config.train.microbatch, tokens=config.model.sequence_length)
    able = OneLayer(program, {name: np.zeros(shape, np.int32) for name, shape in form.items()}).able()
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
    has += [f"--mesh.context {config.mesh.context}"] if config.mesh.context > 1 else []
    too_old = asked == "kernel" and not has_gpu_kernels()
    old = f" with JAX {jax.__version__}, which has no such kernels" if too_old else ""
    return f"--model.attention {asked} cannot do {', '.join(has)}{old}", ", ".join(["auto", *able])
