"""What a family of models is: the one interface between models and the code that distributes their layers.

To add a family, write its `FamilyModel`, declare its batch, count its products, and enter it in `models/registry.py`.
Letters: B batch, T tokens, D model.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax import Array

from megajax.core.backend import Backend
from megajax.core.batch import BatchSpec
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.registry import FAMILIES
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.random import Dropout, NamedKey

Batch = Mapping[str, Array]  # some rows of the arrays in the family's `BatchSpec`


class FamilyModel(Protocol):
    """A model, an `nnx.Module` whose attribute `blocks` holds its stacked layers (`models/layer.py`).

    Besides its output a layer returns figures by name, such as how many tokens it did something with. Step metrics
    hold their sums over layers, microbatches and the mesh axes that the input varies over. They are not differentiated.
    """

    def context(self, batch: Batch, dropout: Dropout) -> Context:
        """What every layer receives for a microbatch besides its input; not differentiated, needs no weights."""

    def embed(self, batch: Batch, context: Context) -> Array:
        """The input of the first of `blocks`, x_BTD; any function of the weights, possibly with layers of its own."""

    def embedding(self, batch: Batch, context: Context) -> Array:
        """`embed` without the layers it contains; language models only."""

    def first_blocks(self) -> Sequence[Any]:
        """The layers that `embed` contains, one by one; language models only."""

    def losses(self, x_BTD: Array, batch: Batch, context: Context) -> dict[str, Array]:
        """For every loss and measure in the batch's form, its sum over the targets, computed from the last layer's
        output; scalars."""

    def predictions(self, x_BTD: Array, batch: Batch, context: Context) -> tuple[dict[str, Array], dict[str, Any]]:
        """For every loss of `prediction.prediction_losses` its sum over the targets, computed from the last layer's
        output, and the figures of the modules' layers; language models only."""

    def scores(self, x_BTD: Array, batch: Batch) -> dict[str, tuple[Array, Array]]:
        """For every loss by name, two arrays over its targets, [B, …]: the cross-entropy, and 1 or 0 (int32) for
        whether the target is the most probable one. Where the target is `IGNORED` they are 0 and `IGNORED`."""

    def logits(self, x_BTD: Array) -> Array:
        """This device's columns of the logits; language models only."""

    def task_logits(self, x_BTD: Array, batch: Batch) -> Array:
        """The logits that answer a task, in at least fp32, identical on all devices: [B, C] for classes, or for texts
        to choose from, or [B, T, 2] for the tokens where a span begins and ends; only models with such a
        head."""


@dataclass(frozen=True)
class MatrixProduct:
    """`count` batches of products [rows, inner] · [inner, columns] on one device."""

    name: str
    count: int
    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """FLOPs of all of them, counting multiplications and additions separately."""
        return 2 * self.count * self.batch * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class Family:
    """A family of models."""

    # Makes a `FamilyModel` with weights from the key.
    model: Callable[[ModelConfig, NamedKey, RegionBoundary, Backend], Any]
    form: Callable[[ModelConfig], BatchSpec]  # what its batch holds
    # (configuration, sequences, queries per attention block) -> the products of a step, each listed once
    products: Callable[[ModelConfig, int, int], list[MatrixProduct]]
    reset_form: BatchSpec | None = None  # its batch if attention restarts with every document; None: not supported
    # Whether `embed` is linear in the weights, so that its backward pass needs nothing from its forward pass.
    linear_embedding: Callable[[ModelConfig], bool] = lambda _: False


def family_of(config: ModelConfig) -> Family:
    """The family that a configuration names."""
    entry = FAMILIES[config.family]
    module = importlib.import_module(entry.module)
    return module.FAMILY if entry.own is None else module.family(entry.own)
