"""A model as plain functions of its weights, on one device and without a mesh, to call, differentiate and compile like
any other JAX function.

Letters: B sequences, T tokens, V vocabulary, C classes, L layers.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from megajax.core.axes import EXPERT
from megajax.core.backend import backend_of
from megajax.core.config import MeshConfig
from megajax.core.errors import brief
from megajax.core.mesh import RULES, make_mesh
from megajax.core.models.config import ModelConfig
from megajax.core.models.router import in_compute_dtype
from megajax.core.models.staged import StagedModel, of_kind
from megajax.core.parallel.boundary import F_AND_G
from megajax.core.parallel.collectives import TENSOR, sum_over, vary
from megajax.core.parallel.random import Dropout
from megajax.core.pipeline.placement import Placement
from megajax.core.precision import COMPUTE_DTYPE, OPERAND_DTYPE
from megajax.core.program.float8 import LayerCopies
from megajax.core.program.program import batch_form, own_loss
from megajax.core.program.weight import weights_of
from megajax.settings.config import Config
from megajax.training.batches import Given, batch_of, inputs_of

Weights = Mapping[str, Any]
_WHOLE = PartitionSpec()


@brief
class PlainModel:
    """The model of a configuration, without dropout. It holds no weights; all methods are pure functions.

    Args:
        config: the model's configuration (`megajax.load_preset`).
        device: where it runs, and where the weights are; by default JAX's first device.
    """

    def __init__(self, config: Config, device: jax.Device | None = None):
        self.config, self.form = config, batch_form(config)
        self._mesh: Mesh = make_mesh([device or jax.devices()[0]])
        backend = backend_of(self._mesh)
        self._cut = StagedModel(config.model, F_AND_G, backend, loss=own_loss(config))
        self._reading = StagedModel(config.model.forward_only, F_AND_G, backend)
        stacks = {kind: Placement(len(numbers), num_stages=1) for kind, numbers in config.model.kinds.items()}
        records = weights_of(self._cut, None, RULES, stacks, MeshConfig().sizes, zero_stage=0)
        self._copies = LayerCopies(config.model, records["blocks"], OPERAND_DTYPE.get(config.precision), both=True)
        of_tokens = PartitionSpec(None, None, TENSOR)
        spec = of_tokens if config.model.head == "pretraining" else _WHOLE
        self._logits = self._compiled(self._logits_in_region, spec)  # jit recompiles for every new batch shape
        self._loss = self._compiled(self._loss_in_region, _WHOLE)

    def init(self, seed: int | None = None) -> dict[str, Any]:
        """Fresh weights in fp32, from the configuration's seed or another: nested dicts, `shared` and `blocks`;
        weights of layers are stacked, [L, …]."""
        here = jax.sharding.SingleDeviceSharding(self._mesh.devices.flat[0])
        fresh = jax.jit(self._cut.init, static_argnums=0, out_shardings=here)
        return fresh(self.config.seed if seed is None else seed)

    def __call__(self, weights: Weights, batch: Given) -> Array:
        """Logits: [B, T, V] for the next token (language models) or every token (BERT); for a model with a task's head,
        the logits that answer the task, such as [B, C]. Experts take all tokens, as in an evaluation.

        Args:
            weights: from `init` or `Model.weights`.
            batch: token ids [B, T]; for BERT a batch by name.
        """
        found = self._logits(weights, inputs_of(self.config, self.form, batch))
        return found[..., : self.config.model.vocab_size] if found.ndim == 3 else found

    def loss(self, weights: Weights, batch: Given) -> Array:
        """What training minimizes, a scalar: the mean cross-entropy over the targets.

        Args:
            weights: from `init` or `Model.weights`.
            batch: token ids [B, T + 1], each of which is predicted from those before it; or a batch by name.
        """
        return self._loss(weights, batch_of(self.config, self.form, batch))

    def _compiled(self, function: Any, out_specs: PartitionSpec) -> Any:
        in_specs = (_WHOLE, _WHOLE)
        region = jax.shard_map(function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)
        return jax.jit(region)

    # The following methods run inside the region.

    def _run(self, staged: StagedModel, weights: Weights, batch: Mapping[str, Array]) -> tuple[Any, Array, Any]:
        """The model's ends, the last layer's output, and the context."""
        computed = in_compute_dtype(dict(weights), COMPUTE_DTYPE[self.config.precision])
        model = staged.ends(computed["shared"])
        context = model.context(batch, Dropout.off())

        def layer(kind: str, x_BTD: Array, numbered: tuple[Array, Any]) -> tuple[Array, None]:
            number, own = numbered
            return staged.layers[kind].block(own)(x_BTD, context, number)[0], None

        numbers_L = jnp.arange(self.config.model.num_blocks, dtype=jnp.int32)
        blocks = self._copies.added(computed["blocks"], numbers_L)
        # A mixture's rows count as sharded over the experts' axis, which has one device here.
        over = (EXPERT,) if self.config.model.num_experts else ()
        x_BTD = vary(model.embed(batch, context), over)
        for kind, places in _runs(self.config.model):
            own = jax.tree.map(lambda weight, places=places: weight[places], of_kind(blocks, kind))
            numbers_N = jnp.asarray(self.config.model.kinds[kind], jnp.int32)[places]
            x_BTD, _ = lax.scan(partial(layer, kind), x_BTD, (numbers_N, own))
        return model, sum_over(x_BTD, over), context

    def _logits_in_region(self, weights: Weights, batch: Mapping[str, Array]) -> Array:
        model, x_BTD, _ = self._run(self._reading, weights, batch)
        if self.config.model.head != "pretraining":
            return model.task_logits(x_BTD, batch)
        found = model.logits(x_BTD)
        return found[0] if isinstance(found, tuple) else found  # BERT also returns the logits of the order

    def _loss_in_region(self, weights: Weights, batch: Mapping[str, Array]) -> Array:
        model, x_BTD, context = self._run(self._cut, weights, batch)
        totals, counts = model.losses(x_BTD, batch, context), self.form.counts(batch)
        means = [totals[name] / jnp.maximum(counts[name], 1).astype(totals[name].dtype) for name in self.form.targets]
        return sum(means[1:], start=means[0])


def _runs(model: ModelConfig) -> Iterator[tuple[str, slice]]:
    """Consecutive layers of a kind, and their places in its stack."""
    periods = model.periods
    if "" in periods:
        yield "", slice(None)
        return
    for period in range(len(next(iter(periods.values())))):
        for kind, runs in periods.items():
            yield kind, slice(sum(runs[:period]), sum(runs[: period + 1]))
