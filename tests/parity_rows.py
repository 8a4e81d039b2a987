"""What configuration a row of `parity_grid.py` is, and which rows do not run by default."""

from typing import Any

from parity_grid import DECODERS, DEFAULT, FEW_LORAS, LORAS, OF_DECODERS, OF_LORAS, OTHERS, TASKS
from tiny import tiny_config

from megajax.config import Config

REST = [row for row in [*OTHERS, *TASKS, *OF_DECODERS, *FEW_LORAS, *OF_LORAS] if row not in DEFAULT]
ROWS = 24  # of the global batch


def config_of(row: tuple, **others: Any) -> Config:
    """Of a row, and what it says nothing of."""
    mesh, schedule, vocabulary, remat, weight_gradients, microbatches, layers, zero, sequence_parallel, model = row
    data, pipe, _ = mesh
    schedule, _, chunks = schedule.rpartition("-")
    virtual = pipe * int(chunks)
    # Few models, so that few references are needed. Of 9 layers, 16 virtual stages have some without any.
    size = {"num_layers": 9, "vocab_size": 101}  # whose vocabulary is padded
    if layers == "divisible":
        size = {"num_layers": virtual * -(-8 // virtual), "vocab_size": 128}
    multiple = {1: 3, 2: 4, 4: 8, 8: 8}[pipe]
    number = {"fewer": max(1, pipe // 2), "not a multiple": pipe + pipe // 2, "a multiple": multiple}[microbatches]
    assert ROWS % (data * number) == 0
    options = {"schedule": schedule, "chunks": int(chunks), "vocabulary": vocabulary, "remat": remat, "zero": zero}
    options |= {"sequence_parallel": sequence_parallel, "microbatch": ROWS // data // number, "global_batch": ROWS}
    return tiny_config(mesh, **options | deferring(weight_gradients) | size | of(model) | others)


def of(model: str) -> dict[str, Any]:
    """The words of its configuration."""
    if model in DECODERS | LORAS:
        return (DECODERS | LORAS)[model]
    family, order, head = (*model.split("-"), *("", "")[model.count("-") :])
    return {"family": family, "layer_order": order or "pre", "head": head or "pretraining"}


def deferring(weight_gradients: str) -> dict[str, Any]:
    """What a word of the grid says."""
    word, _, most = weight_gradients.partition("-")
    return {"weight_gradients": word, "max_deferred": int(most or -1)}
