"""The communication of a mixture of experts, for `verify/theory.py`: `core/models/experts.py` in arithmetic."""

from collections.abc import Iterator

from megajax.core.axes import EXPERT
from megajax.core.backend import Backend
from megajax.core.models.experts import capacity_of
from megajax.core.parallel.collectives import CONTEXT, TENSOR
from megajax.plan.communication import EXCHANGE, GATHER, REDUCE, SCATTER, Communication, one
from megajax.plan.sizes import Occurrences, Sizes
from megajax.settings.config import Config

_INTEGER = 4  # bytes of an expert choice, and of a load


class ExpertTraffic(Sizes):
    """What a step's mixtures communicate besides inputs and outputs, which cross the boundaries of regions like an
    MLP's; nothing without experts."""

    def __init__(self, config: Config, operand_item: int | None, backend: Backend):
        super().__init__(config, operand_item, backend)
        self.backend = backend  # the forms of the step

    def forward(
        self, purpose: str, times: Occurrences, *, rows: bool = True, result: bool = True
    ) -> Iterator[Communication]:
        """The forward pass, or what recomputation repeats of it: the choices, what came back, and optionally the
        experts' `rows` and the `result`, the sum over their devices."""
        model, (batch, here, _) = self.config.model, self.whole
        if not model.num_experts:
            return
        if self.shared_over:  # how often each expert is chosen in a sequence
            yield one(purpose, REDUCE, self.shared_over, (batch, model.num_experts), _INTEGER, times)
        if self.operand_item:  # of what the product by rows takes
            yield one(purpose, REDUCE, (TENSOR,), (1, *self.computed_rows), _INTEGER, times)
        choices, between = (batch, here, model.experts_per_token), (*self.own[:2], model.experts_per_token)
        for item in (self.wide, _INTEGER) if self.splits_sequence else ():
            yield one(purpose, GATHER, (TENSOR,), between, item, times)
        if not model.expert_capacity:
            if rows:
                yield one(purpose, GATHER, (EXPERT,), self.whole, self.item, times)
            for item in (self.wide, _INTEGER):
                yield one(purpose, GATHER, (EXPERT,), choices, item, times)
            if result:
                yield one(purpose, SCATTER, (EXPERT,), self._of_group, self.item, times)
            return
        if self.shared_over:
            everywhere = (batch, self.tokens, model.experts_per_token)
            yield one(purpose, REDUCE, self.shared_over, everywhere, _INTEGER, times)
        if rows:
            yield from self._dispatch(purpose, times)
        yield from self._combine(purpose, times)

    def backward(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        """The gradients of all that, including those of tokens' shares."""
        model, (batch, here, _) = self.config.model, self.whole
        if not model.num_experts:
            return
        of_shares = (batch, here, model.experts_per_token)
        yield one(purpose, SCATTER if self.splits_sequence else REDUCE, (TENSOR,), of_shares, self.wide, times)
        if model.expert_capacity:
            yield from self._dispatch(purpose, times)
            yield from self._combine(purpose, times)
            return
        yield one(purpose, GATHER, (EXPERT,), self.whole, self.item, times)
        group = batch * self.config.mesh.expert, *of_shares[1:]
        yield one(purpose, SCATTER, (EXPERT,), group, self.wide, times)
        yield one(purpose, SCATTER, (EXPERT,), self._of_group, self.item, times)

    @property
    def computed_rows(self) -> tuple[int, ...]:
        """The rows that a device's experts compute: of each, or without a capacity in blocks of all."""
        model, devices = self.config.model, self.config.mesh.expert
        experts = model.num_experts // devices
        if model.expert_capacity:
            rows, _, _ = self._sent
            return experts, rows
        block = self.backend.expert_block
        choices = self.whole[0] * devices * self.whole[1] * model.experts_per_token
        blocks = -(-choices // block) + experts
        of_expert = model.hidden_size * model.expert_size // self.config.mesh.tensor * self.item
        turns = -(-blocks // self.backend.blocks_at_once(of_expert))  # with as many blocks in each
        return (-(-blocks // turns) * turns * block,)

    @property
    def _of_group(self) -> tuple[int, ...]:
        """Shape of an activation with all rows of an expert group."""
        return (self.whole[0] * self.config.mesh.expert, *self.whole[1:])

    def _dispatch(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        """Send rows to the experts' devices; in the backward pass, the gradients of their outputs."""
        rows, *others = self._sent
        if self.way != "none":
            whole = (rows * self.config.mesh.context, *others)
            yield one(purpose, SCATTER, (CONTEXT,), whole, self.item, times)
        yield one(purpose, EXCHANGE, (EXPERT,), self._sent, self.item, times)

    def _combine(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        """Send results back; in the backward pass, the gradients of the experts' inputs."""
        yield one(purpose, EXCHANGE, (EXPERT,), self._sent, self.item, times)
        if self.way != "none":
            yield one(purpose, GATHER, (CONTEXT,), self._sent, self.item, times)

    @property
    def _sent(self) -> tuple[int, int, int]:
        """Shape of what a device sends to the experts: rows, for each of a device's experts. Rows are those of every
        device, every sequence, and this device's share of the places of its context group."""
        model, context, devices = self.config.model, self.config.mesh.context, self.config.mesh.expert
        places = -(-capacity_of(model, self.tokens) // context)
        return devices * self.whole[0] * places, model.num_experts // devices, model.hidden_size
