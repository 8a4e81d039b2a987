"""An optimizer of the user's: any optax transformation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import optax
from jax import Array
from jax.tree_util import DictKey

from megajax.core.errors import UserError
from megajax.core.optim.adam import learning_rate
from megajax.core.optim.config import OPTIMIZERS, OWN, OptimizerConfig
from megajax.core.trees import Path, Tree


@dataclass(frozen=True)
class OwnOptimizer:
    """An optimizer in place of those that `optimizer.name` can name.

    Attributes:
        given: an optax transformation, or a function of a schedule that makes one, such as `optax.lion`.
        elementwise: whether it updates every number by itself; None: it is traced to see.
    """

    given: Any
    elementwise: bool | None = None

    def __post_init__(self) -> None:
        if not callable(self.given) and not _is_transformation(self.given):
            valid = "an optax transformation, or a function that makes one from a schedule, such as optax.lion"
            raise UserError(f"optimizer {self.given!r:.80}; valid: {valid}")

    @property
    def has_our_rate(self) -> bool:
        """Whether it follows the configuration's schedule."""
        return not _is_transformation(self.given)

    def transformation(self, config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
        """The transformation, in its form with further arguments, which it ignores; with JAX's keys as their data."""
        made = self.given(partial(learning_rate, config=config)) if self.has_our_rate else self.given
        if not _is_transformation(made):
            raise UserError(f"optimizer: the function returned {made!r:.80}; valid: an optax transformation")

        def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
            updates, new = made.update(grads, with_keys(state), params)
            return updates, _with_data(new)

        return optax.GradientTransformationExtraArgs(lambda params: _with_data(made.init(params)), update)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _KeyData:
    """A key of JAX as an array, which can be stored."""

    data: Array
    kind: Any = field(metadata={"static": True})


def _with_data(state: Tree) -> Tree:
    """A state without keys of JAX."""
    return jax.tree.map(_without_key, state)


def _without_key(x: Any) -> Any:
    is_key = hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return _KeyData(jax.random.key_data(x), jax.random.key_impl(x)) if is_key else x


def with_keys(state: Tree) -> Tree:
    """The inverse: a state as the user's optimizer knows it."""
    return jax.tree.map(_with_key, state, is_leaf=lambda x: isinstance(x, _KeyData))


def _with_key(x: Any) -> Any:
    return jax.random.wrap_key_data(x.data, impl=x.kind) if isinstance(x, _KeyData) else x


def _is_transformation(given: Any) -> bool:
    return hasattr(given, "init") and hasattr(given, "update")


def own_optimizer(config: OptimizerConfig, optimizer: OwnOptimizer | None) -> OwnOptimizer | None:
    """The optimizer that is given or registered; None for AdamW and Muon. If a run had one that is not there, weights
    can be read all the same; its place is taken by one that does nothing."""
    made = optax.identity() if config.name == OWN else OPTIMIZERS[config.name]
    return optimizer or (made and OwnOptimizer(made))


def path_in(path: Sequence[Any], weights: Mapping[Path, Any]) -> Path | None:
    """The path of the weight that a leaf of a state belongs to: the longest end of the leaf's own that is one."""
    names = tuple(key.key for key in path if isinstance(key, DictKey))
    return next((names[start:] for start in range(len(names)) if names[start:] in weights), None)
