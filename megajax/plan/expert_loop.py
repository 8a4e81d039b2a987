"""The loop in which dropless experts multiply blocks of rows, as `core/models/grouped.py` divides it."""

from dataclasses import dataclass

from megajax.core.backend import Backend
from megajax.plan.costs import Product
from megajax.settings.config import Config


@dataclass(frozen=True)
class ExpertLoop:
    """A loop that multiplies the rows of experts with one weight of each."""

    turns: int  # that have rows, if all experts are chosen equally often
    blocks: int  # multiplied in a turn, each with a copy of its expert's weight
    block_rows: int
    rows: int  # that there is room for, used or not

    @classmethod
    def from_config(cls, config: Config, backend: Backend, first: Product, microbatch: int, item: int) -> "ExpertLoop":
        """Those of the products of a layer, of which this is the first; numbers have `item` bytes."""
        chosen, hidden, columns = first.dims.shape(microbatch)  # by the tokens of one device
        experts, block = first.experts, backend.expert_block
        at_once = backend.blocks_at_once(hidden * columns // first.weights * item)
        room = -(-chosen * config.mesh.expert // block) + experts
        turns = -(-room // at_once)
        blocks = -(-room // turns)
        used = experts * max(1.0, chosen / experts / block + 0.5)  # half of an expert's last block is padding
        return cls(min(turns, -int(-used // blocks)), blocks, block, turns * blocks * block)

    @property
    def line(self) -> str:
        """What a plan says of it."""
        turns = f"{self.turns} turns" if self.turns > 1 else "one turn"
        blocks = f"{self.blocks} blocks" if self.blocks > 1 else "one block"
        return (
            f"experts without a capacity: each product is a loop of {turns} of {blocks} of {self.block_rows} rows, an "
            "estimate (without the loop: --model.expert-capacity 1.25)"
        )
