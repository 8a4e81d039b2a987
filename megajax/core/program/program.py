"""A configuration on a mesh: how its state and batches are sharded, and how functions over them are compiled.

The computations themselves are in `train_step.py` and `scoring.py`.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.stages import Wrapped
from jax.typing import DTypeLike

from megajax.core.backend import Backend, backend_of
from megajax.core.batch import BatchSpec
from megajax.core.config import StepConfig
from megajax.core.mesh import ROWS, batch_specs, make_abstract_mesh, make_mesh, on_mesh, shardings
from megajax.core.models.attend import cudnn_has
from megajax.core.models.attention_mask import AttentionMask
from megajax.core.models.context_attention import context_way
from megajax.core.models.family import family_of
from megajax.core.models.own_loss import WithLoss
from megajax.core.models.staged import StagedModel
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.collectives import PIPE, TENSOR, Axes
from megajax.core.parallel.tokens import ContextWay
from megajax.core.pipeline.schedule import forward_only, make_schedule
from megajax.core.pipeline.table import Schedule
from megajax.core.precision import COMPUTE_DTYPE, OPERAND_DTYPE
from megajax.core.program.loss import loss_of
from megajax.core.program.overlap import overlaps_reductions, scans_layers, size_of_layers
from megajax.core.program.state import StateLayout

Batch = dict[str, Array]  # the arrays in the program's `form`, [rows of the global batch, …]
BATCH = "batch"
"""Stands for the specs of a batch's arrays."""


class Program:
    """A configuration on a mesh.

    Attributes:
        model: the model as a train step runs it.
        form: what a batch holds.
        layout: shapes and sharding of the state.
        gradient_dtype: the dtype that gradients are accumulated in.
        operand_dtype: the dtype of operands of the layers' products, if it differs from the compute dtype: e4m3 in fp8.
            If it is the compute dtype, those products are scaled but not rounded (`verify`).
    """

    def __init__(
        self, config: StepConfig, mesh: Mesh, backend: Backend | None = None, operand_dtype: DTypeLike | None = None
    ):
        self.config, self.mesh = config, mesh
        self.operand_dtype = operand_dtype or OPERAND_DTYPE.get(config.precision)
        backend = (backend or backend_of(mesh)).asked(config.model.attention)
        self.backend = backend.deterministic if config.deterministic else backend
        self.form, self._loss = batch_form(config), own_loss(config)
        self.model = StagedModel(config.model, training_boundary(config), self.backend, config.lora, self._loss)
        self.layout = StateLayout(config, mesh, self.model, self.operand_dtype, self.backend)
        self.optimizer = self.layout.optimizer
        self.batch_shardings = shardings(mesh, batch_specs(self.form))
        summed_in = config.optimizer.gradient_dtype
        self.gradient_dtype = self.layout.main_dtype if summed_in == "fp32" else COMPUTE_DTYPE[summed_in]
        self._compiled: dict[Any, Wrapped] = {}
        self._forward_models: dict[str, StagedModel] = {}

    @classmethod
    def on(
        cls,
        config: StepConfig,
        devices: list[jax.Device] | None = None,
        operand_dtype: DTypeLike | None = None,
        backend: Backend | None = None,
    ) -> "Program":
        """The program on the mesh that the configuration asks for, made of `devices`, or of all devices."""
        return cls(config, make_mesh(devices, **config.mesh.on_devices), backend, operand_dtype)

    @classmethod
    def abstract(cls, config: StepConfig, backend: Backend) -> "Program":
        """The program on the configuration's mesh without devices, to be traced as for those of a `backend`."""
        mesh: Any = make_abstract_mesh(**config.mesh.on_devices)  # is enough for tracing
        return cls(config, mesh, backend)

    def forward_model(self, length: int = 0) -> StagedModel:
        """The model for forward-only programs. Sequences are not sharded, so they may have any length that the model
        has positions for; but if a context group can share sequences of `length`, these are sharded."""
        way: ContextWay = "none"
        if length and length % (2 * self.config.mesh.context) == 0:  # a window may cover more in this length
            of_length = dataclasses.replace(self.config.model, sequence_length=length)
            fusible, precision = _fusible(self.config, dropout=0), self.config.precision
            way = context_way(of_length, self.config.mesh.sizes, precision=precision, fusible=fusible)
        if way not in self._forward_models:
            together = self.config.mesh.pipe == 1
            boundary = RegionBoundary(vocabulary=vocabulary_axes(self.config), context=way, together=together)
            model = self.config.model.forward_only
            self._forward_models[way] = StagedModel(model, boundary, self.backend, self.config.lora, self._loss)
        return self._forward_models[way]

    def region(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Turn `function` of this device's shards into a function of global arrays: one `shard_map` with all mesh axes
        manual and their types checked. A batch, with `BATCH` as its spec, may lack some arrays of the form."""

        def call(*args: Any) -> Any:
            places = {name: place.spec for name, place in self.batch_shardings.items()}
            specs = tuple(
                {name: places[name] for name in arg} if spec is BATCH else spec
                for spec, arg in zip(in_specs, args, strict=True)
            )
            specs, results = on_mesh(self.mesh, (specs, out_specs))
            region = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=results, check_vma=True)
            return region(*args)

        return call

    def compiled(self, function: Callable, in_specs: tuple, out_specs: Any, *static: Any, **options: Any) -> Wrapped:
        """`function(program, *static, …)` as one `jit` of one region, with `options` for `jax.jit`; cached."""
        if (function, static) not in self._compiled:
            region = self.region(partial(function, self, *static), in_specs, out_specs)
            options.setdefault("compiler_options", self._same_bits or None)
            self._compiled[function, static] = jax.jit(region, **options)
        return self._compiled[function, static]

    def put_batch(self, batch: Mapping[str, np.ndarray], rows: list[int]) -> Batch:
        """The global batch as arrays over the mesh, given this process's rows of it in the order of `rows`."""
        position = {row: index for index, row in enumerate(rows)}

        def put(local: np.ndarray, sharding: NamedSharding) -> Array:
            shape = (self.config.train.global_batch, *local.shape[1:])

            def shard(index: Any) -> np.ndarray:
                return local[[position[row] for row in range(*index[0].indices(shape[0]))]][:, *index[1:]]

            return jax.make_array_from_callback(shape, sharding, shard)

        return {name: put(array, self.batch_shardings[name]) for name, array in batch.items()}

    def with_batch(self, size: int) -> "Program":
        """The program for steps with another global batch size; both programs have the same state."""
        if size == self.config.train.global_batch:
            return self
        train = dataclasses.replace(self.config.train, global_batch=size)
        return Program(
            dataclasses.replace(self.config, train=train), self.mesh, self.backend, operand_dtype=self.operand_dtype
        )

    @cached_property
    def local_rows(self) -> list[int]:
        """Rows of the global batch that this process's devices need."""
        return self.rows_of(self.config.train.global_batch)

    def rows_of(self, size: int) -> list[int]:
        """`local_rows` for a global batch of another size."""
        index = shardings(self.mesh, ROWS).addressable_devices_indices_map((size,))
        slices = [index[0] for index in index.values() if index is not None]
        return sorted({row for rows in slices for row in range(*rows.indices(size))})

    @property
    def batch_types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Types of the arrays of a global batch."""
        shapes = self.form.shapes(self.config.train.global_batch, tokens=self.config.model.sequence_length)
        return {name: jax.ShapeDtypeStruct(shape, self.form.entries[name].dtype) for name, shape in shapes.items()}

    @property
    def num_microbatches(self) -> int:
        """How many microbatches a device's rows are divided into; fewer rows than a microbatch make one."""
        train = self.config.train
        return max(1, train.global_batch // (self.config.mesh.row_shards * train.microbatch))

    @cached_property
    def overlaps_reductions(self) -> bool:
        """See `overlap.overlaps_reductions`."""
        layout = self.layout
        trained = jax.tree.leaves(layout.trained(layout.weights))
        return overlaps_reductions(self.config, self.backend, size_of_layers(trained))

    @property
    def ticks_at_once(self) -> int:
        """How many ticks an iteration of the train step's loop computes."""
        return 2 if self.config.pipeline.paired_microbatches and self.num_microbatches > 1 else 1

    @property
    def _same_bits(self) -> dict[str, int | bool | str]:
        """Compiler options without which the bits of a result would depend on what else is computed."""
        return dict(self.backend.same_bits) if self.config.bitwise else {}

    @property
    def options(self) -> dict[str, int | bool | str]:
        """Compiler options of the train step, without those that the user has set."""
        chosen: dict[str, int | bool | str] = dict(self.backend.always)
        if self.ticks_at_once > 1:
            chosen |= dict.fromkeys(self.backend.apart, 0)
        if not scans_layers(self.config, self.backend) and self.config.train.remat != "stage":
            chosen |= dict.fromkeys(self.backend.unrolled, True)
        chosen |= self._same_bits
        return {name: value for name, value in chosen.items() if f"--{name}=" not in os.environ.get("XLA_FLAGS", "")}

    @cached_property
    def schedule(self) -> Schedule:
        """The table of a training step."""
        given, pipe = self.config.pipeline, self.config.mesh.pipe
        return make_schedule(given.schedule, pipe, self.num_microbatches, given.chunks, given.deferring())

    @cached_property
    def forward_schedule(self) -> Schedule:
        """The table of a forward-only program."""
        return forward_only(self.config.mesh.pipe, self.num_microbatches, self.config.pipeline.chunks)


def batch_form(config: StepConfig) -> BatchSpec:
    """What a batch of this configuration holds."""
    family = family_of(config.model)
    form = family.reset_form if config.data.reset_attention else family.form(config.model)
    assert form, config.model.family
    loss = loss_of(config)
    return loss.form(form) if loss else form


def own_loss(config: StepConfig) -> Callable[[Any], WithLoss] | None:
    """What gives a model's ends the loss of the configuration; None: they have their own."""
    loss = loss_of(config)
    return partial(WithLoss, loss=loss, form=batch_form(config)) if loss else None


def vocabulary_axes(config: StepConfig) -> Axes:
    """The mesh axes that the vocabulary is sharded over."""
    return (PIPE, TENSOR) if config.splits_vocabulary else TENSOR


def training_boundary(config: StepConfig) -> RegionBoundary:
    """The boundary of tensor-parallel regions in a training step."""
    regather = config.train.remat != "layer"
    together = config.mesh.pipe == 1
    way = training_way(config)
    return RegionBoundary(config.sequence_parallel, way, vocabulary_axes(config), regather, together=together)


def training_way(config: StepConfig) -> ContextWay:
    """How attention reaches tokens on other devices of a context group in a training step."""
    fusible = _fusible(config, config.model.dropout)
    return context_way(config.model, config.mesh.sizes, config.train.remat, config.precision, fusible=fusible)


def _fusible(config: StepConfig, dropout: float) -> bool:
    """Whether a fused implementation is asked for, or cuDNN supports this attention over whole sequences."""
    if config.model.attention != "auto":
        return config.model.attention != "blocks"
    model = config.model
    has_heads = cudnn_has(model.head_size, COMPUTE_DTYPE[config.precision]) and model.value_head_size <= model.head_size
    visible = AttentionMask.of_model(model, model.sequence_length)
    limited = config.data.reset_attention or visible.window_of_some is not None or model.attention_sinks
    limited |= visible.score is not None
    return has_heads and dropout == 0 and not limited
