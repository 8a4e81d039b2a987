"""What a training step needs of a device's memory, in bytes by part.

Weights, main weights, moments and the sums of gradients are exact (`program.memory.state_bytes`), so are what is kept
of activations and the factors of weight gradients that wait, which are those of a traced layer (`plan/traced.py`). The
rest is a model (`plan/temporaries.py`), of which docs/plan.md says how far it is from what XLA allocates.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from megajax.backend import GPU, Backend
from megajax.config import Config
from megajax.pipeline.deferral import Deferring
from megajax.pipeline.schedule import make_schedule
from megajax.plan.costs import StepCost
from megajax.plan.machines import Machine
from megajax.plan.sizes import Sizes
from megajax.plan.temporaries import Temporaries
from megajax.plan.traced import step_cost
from megajax.program.program import batch_form

_COUNTERS = 2 * 4  # bytes of the optimizer's
_WORD = 4  # bytes of a number of the batch


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        weights, main_weights, moments: what lives from step to step.
        batch: a device's rows.
        gradients: their sums, and where these are in half precision, what the optimizer gets.
        kept: of activations, until their backward pass.
        factors: of weight gradients that wait.
        hand_overs: activations and gradients on their way between stages, and those that wait to be used.
        temporaries: of the layer and the end that run, and of the optimizer.
    """

    weights: int
    main_weights: int
    moments: int
    batch: int
    gradients: int
    kept: int
    factors: int
    hand_overs: int
    temporaries: int

    @property
    def state(self) -> int:
        """What a step is given."""
        return self.weights + self.main_weights + self.moments + self.batch

    @property
    def of_step(self) -> int:
        """What lives while a step runs."""
        return self.total - self.state

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def backend_of(machine: Machine) -> Backend:
    """The forms that suit a GPU, cuDNN's attention if there is one."""
    return GPU if machine.fused_attention else replace(GPU, fused_attention=False)


def memory(config: Config, backend: Backend = GPU, cost: StepCost | None = None) -> Memory:
    """What a step of a valid configuration needs on a device of its mesh; of a search with its `cost`, which many
    configurations have in common."""
    cost = cost or step_cost(config, backend)
    step, pipeline, form = Sizes(config), config.pipeline, batch_form(config)
    slots, factor_slots, activations = _buffers(
        pipeline.schedule, config.mesh.pipe, step.microbatches, pipeline.chunks, pipeline.deferring()
    )
    others = step.held.num_trained * step.wide if step.summed != step.wide else 0
    losses = len(form.targets | form.measures) * max(4, step.summed)
    batch = sum(prod(shape) for shape in form.shapes(config.train.global_batch, tokens=step.tokens).values())
    residuals = step.layers_of_chunk * cost.layer.residuals.num_bytes(step.microbatch)
    kept = max(1, slots) * (step.activation_bytes if step.recomputes_stage else residuals)
    factors = factor_slots * step.layers_of_chunk * cost.layer.factors.num_bytes(step.microbatch)
    return Memory(
        weights=step.held.num_computed * step.item,
        main_weights=step.held.num_trained * step.wide if step.item != step.wide else 0,
        moments=2 * step.held.num_trained * step.wide + _COUNTERS,
        batch=batch * _WORD // config.mesh.row_shards,
        gradients=step.held.num_summed * step.summed + losses + others,
        kept=kept,
        factors=factors,
        hand_overs=activations * step.activation_bytes,
        temporaries=Temporaries(step, cost, backend, kept, factors).most,
    )


@lru_cache(maxsize=512)
def _buffers(name: str, pipe: int, microbatches: int, chunks: int, deferring: Deferring | None) -> tuple[int, int, int]:
    """How many chunks a schedule keeps, of how many the factors wait, and how many activations of one token's width are
    on their way or wait."""
    table = make_schedule(name, pipe, microbatches, chunks, deferring)
    if pipe == 1:
        return table.num_slots, table.num_factor_slots, 0
    waiting = [0 if way.direct else way.inbox_depth + 1 for way in (table.forward, table.backward)]
    outputs = 0 if table.turns_at_once else table.num_slots
    on_their_way = 2  # one in either direction
    return table.num_slots, table.num_factor_slots, on_their_way + sum(waiting) + outputs
