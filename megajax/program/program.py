"""A configuration on a mesh: where its state and its batches lie, and how functions over them are compiled.

What is computed stands beside it: `train_step.py`, `scoring.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.stages import Wrapped

from megajax.backend import Backend, backend_of
from megajax.batch import BatchSpec
from megajax.config import Config
from megajax.mesh import ROWS, batch_specs, make_abstract_mesh, make_mesh, shardings
from megajax.models.attend import cudnn_has
from megajax.models.context_attention import context_way
from megajax.models.family import CutModel, family_of
from megajax.parallel.boundary import RegionBoundary
from megajax.parallel.collectives import PIPE, TENSOR, Axes
from megajax.parallel.tokens import ContextWay
from megajax.pipeline.schedule import forward_only, make_schedule
from megajax.pipeline.table import Schedule
from megajax.precision import COMPUTE_DTYPE
from megajax.program.state import StateLayout

Batch = dict[str, Array]  # the arrays of the program's form, int32 [rows of the global batch, …]
BATCH = "batch"
"""In the place of a spec: those of a batch's arrays."""


class Program:
    """A configuration on a mesh.

    Attributes:
        model: of a train step.
        form: what a batch holds.
        layout: shapes and places of the state.
        gradient_dtype: what gradients are summed in.
    """

    def __init__(self, config: Config, mesh: Mesh, backend: Backend | None = None):
        self.config, self.mesh = config, mesh
        self.backend = backend or backend_of(mesh)
        self.model = CutModel(config.model, training_boundary(config), self.backend, config.lora)
        self.form = batch_form(config)
        self.layout = StateLayout(config, mesh, self.model)
        self.optimizer = self.layout.optimizer
        self.batch_shardings = shardings(mesh, batch_specs(self.form))
        summed_in = config.optimizer.gradient_dtype
        self.gradient_dtype = self.layout.main_dtype if summed_in == "fp32" else COMPUTE_DTYPE[summed_in]
        self._compiled: dict[Any, Wrapped] = {}
        self._forward_models: dict[str, CutModel] = {}

    @classmethod
    def on(cls, config: Config, devices: list[jax.Device] | None = None) -> "Program":
        """On the mesh that the configuration asks for, of `devices`, or of all there are."""
        return cls(config, make_mesh(devices, **config.mesh.sizes))

    @classmethod
    def abstract(cls, config: Config, backend: Backend) -> "Program":
        """On the mesh that the configuration asks for, without devices: to be traced as on those of a `backend`."""
        mesh: Any = make_abstract_mesh(**config.mesh.sizes)  # is enough for tracing
        return cls(config, mesh, backend)

    def forward_model(self, length: int = 0) -> CutModel:
        """Of what runs forward only, where activations are not kept: no sequence is sharded, so that it may have any
        length that the model has positions for; but for one of `length`, where a context group can share it."""
        way: ContextWay = "none"
        if length and length % (2 * self.config.mesh.context) == 0:  # of this length a window may reach further
            of_length = dataclasses.replace(self.config.model, sequence_length=length)
            way = context_way(of_length, self.config.mesh.sizes, fusible=_fusible(self.config, dropout=0))
        if way not in self._forward_models:
            together = self.config.mesh.pipe == 1
            boundary = RegionBoundary(vocabulary=vocabulary_axes(self.config), context=way, together=together)
            model = self.config.model.forward_only
            self._forward_models[way] = CutModel(model, boundary, self.backend, self.config.lora)
        return self._forward_models[way]

    def region(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """`function` of this device's shards as a function of global arrays: one `shard_map`, all mesh axes manual and
        their types checked. A batch, whose spec is `BATCH`, need not have all arrays of the form."""

        def call(*args: Any) -> Any:
            places = {name: place.spec for name, place in self.batch_shardings.items()}
            specs = tuple(
                {name: places[name] for name in arg} if spec is BATCH else spec
                for spec, arg in zip(in_specs, args, strict=True)
            )
            region = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=True)
            return region(*args)

        return call

    def compiled(self, function: Callable, in_specs: tuple, out_specs: Any, *static: Any, **options: Any) -> Wrapped:
        """`function(program, *static, …)` as one `jit` of one region, with `options` of `jax.jit`; made once."""
        if (function, static) not in self._compiled:
            region = self.region(partial(function, self, *static), in_specs, out_specs)
            self._compiled[function, static] = jax.jit(region, **options)
        return self._compiled[function, static]

    def put_batch(self, batch: Mapping[str, np.ndarray], rows: list[int]) -> Batch:
        """The global batch as arrays over the mesh, from the rows that this process holds, in the order of `rows`."""
        place = {row: index for index, row in enumerate(rows)}

        def put(local: np.ndarray, sharding: NamedSharding) -> Array:
            shape = (self.config.train.global_batch, *local.shape[1:])

            def shard(index: Any) -> np.ndarray:
                return local[[place[row] for row in range(*index[0].indices(shape[0]))]][:, *index[1:]]

            return jax.make_array_from_callback(shape, sharding, shard)

        return {name: put(array, self.batch_shardings[name]) for name, array in batch.items()}

    def with_batch(self, size: int) -> "Program":
        """The program for steps of another global batch; a state of the one is a state of the other."""
        if size == self.config.train.global_batch:
            return self
        constant: dict[str, Any] = {"ramp_start": 0, "ramp_increment": 0, "ramp_samples": 0}
        train = dataclasses.replace(self.config.train, global_batch=size, **constant)
        return Program(dataclasses.replace(self.config, train=train), self.mesh)

    @cached_property
    def local_rows(self) -> list[int]:
        """Rows of the global batch that this process's devices need."""
        return self.rows_of(self.config.train.global_batch)

    def rows_of(self, size: int) -> list[int]:
        """`local_rows` of a global batch of another size."""
        index = NamedSharding(self.mesh, ROWS).addressable_devices_indices_map((size,))
        slices = [index[0] for index in index.values() if index is not None]
        return sorted({row for rows in slices for row in range(*rows.indices(size))})

    @property
    def batch_types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Types of the arrays of a global batch."""
        shapes = self.form.shapes(self.config.train.global_batch, tokens=self.config.model.sequence_length)
        return {name: jax.ShapeDtypeStruct(shape, np.int32) for name, shape in shapes.items()}

    @property
    def num_microbatches(self) -> int:
        """How many microbatches a device's rows are cut in; fewer rows than one are one."""
        train = self.config.train
        return max(1, train.global_batch // (self.config.mesh.row_shards * train.microbatch))

    @cached_property
    def schedule(self) -> Schedule:
        """The table of a training step."""
        given, pipe = self.config.pipeline, self.config.mesh.pipe
        return make_schedule(given.schedule, pipe, self.num_microbatches, given.chunks, given.deferring())

    @cached_property
    def forward_schedule(self) -> Schedule:
        """The table of what runs forward only."""
        return forward_only(self.config.mesh.pipe, self.num_microbatches, self.config.pipeline.chunks)


def batch_form(config: Config) -> BatchSpec:
    """What a batch of a configuration holds."""
    family = family_of(config.model)
    if not config.data.reset_attention:
        return family.form(config.model)
    assert family.reset_form, config.model.family
    return family.reset_form


def vocabulary_axes(config: Config) -> Axes:
    """The mesh axes that the vocabulary is sharded over."""
    return (PIPE, TENSOR) if config.splits_vocabulary else TENSOR


def training_boundary(config: Config) -> RegionBoundary:
    """The boundary of tensor-parallel regions in a training step."""
    regather = config.train.remat != "layer"
    together = config.mesh.pipe == 1
    way = training_way(config)
    return RegionBoundary(config.sequence_parallel, way, vocabulary_axes(config), regather, together=together)


def training_way(config: Config) -> ContextWay:
    """How attention reaches the tokens of the other devices of a context group in a training step."""
    fusible = _fusible(config, config.model.dropout)
    return context_way(config.model, config.mesh.sizes, config.train.remat, fusible=fusible)


def _fusible(config: Config, dropout: float) -> bool:
    """Whether attention of whole sequences is one that cuDNN has."""
    has_heads = cudnn_has(config.model.head_size, COMPUTE_DTYPE[config.precision])
    return has_heads and dropout == 0 and not config.data.reset_attention


def scans_layers(config: Config, backend: Backend) -> bool:
    """Whether the layers run as one scan (compile time flat in their number) or unrolled.

    `auto`: unrolled up to the number of layers that the backend says, since a step is faster then and compiles for
    longer (docs/benchmarks). With ZeRO-3 scanned: of unrolled layers XLA gathers the weights once for forward and
    backward, and keeps them.
    """
    if config.model.scan_layers == "auto":
        layers_per_chunk = -(-config.model.num_blocks // (config.mesh.pipe * config.pipeline.chunks))
        return layers_per_chunk > backend.unroll_layers or config.optimizer.zero == 3
    return config.model.scan_layers == "true"
