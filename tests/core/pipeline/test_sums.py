"""Sums of gradients over many microbatches lose nothing."""

import numpy as np
from tiny import drawn_params, tiny_config, tiny_program

from megajax.core.batch import IGNORED
from megajax.core.program.train_step import loss_and_gradients
from megajax.data.synthetic import random_batch
from megajax.verify import named_leaves
from megajax.verify.comparison import leaf_errors

MICROBATCHES = 512  # a power of two, by which a division rounds nothing


def test_a_row_many_times_has_the_gradient_of_one() -> None:
    """In bf16, summed in fp32: a sum in bf16 would no longer grow after 256 equal terms."""
    size = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "sequence_length": 4, "vocab_size": 13}
    size |= {"vocab_multiple": 8, "scan_layers": "false", "tied_embedding": False}
    config = tiny_config(precision="bf16", global_batch=MICROBATCHES, dropout=0.0, **size)
    program = tiny_program(config)
    row = {name: np.repeat(array[:1], MICROBATCHES, axis=0) for name, array in random_batch(config, 0).items()}
    once = row | {"targets": np.where(np.arange(MICROBATCHES)[:, None] == 0, row["targets"], IGNORED)}
    placed = [program.put_batch(batch, program.local_rows) for batch in (once, row)]
    params, passes = drawn_params(program), loss_and_gradients(program)
    of_one, of_all = (named_leaves(passes(params, batch, np.int32(0))[1]) for batch in placed)
    assert max(leaf_errors(of_one, of_all).values()) < 1e-5
