"""The buffer of factors in the compiled step."""

import re

import jax
import pytest
from tiny import abstract_batch, tiny_config, tiny_program

from megajax.program.train_step import loss_and_gradients


@pytest.mark.parametrize(
    ("schedule", "chunks", "scan"),
    [("1f1b", 1, "true"), pytest.param("interleaved", 2, "false", marks=pytest.mark.full)],
)
def test_is_not_copied(schedule, chunks, scan):
    """No tick copies it, however many slots it has: copies of its shape stand before the loop only."""
    config = tiny_config(
        (1, 2, 1), schedule=schedule, chunks=chunks, weight_gradients="deferred", global_batch=5, scan_layers=scan
    )
    program = tiny_program(config)
    arguments = program.layout.shapes.params, abstract_batch(config), jax.ShapeDtypeStruct((), "int32")
    lowered = loss_and_gradients(program).lower(*arguments)
    text = lowered.compile({"xla_backend_optimization_level": 0}).as_text()
    slots, layers = program.schedule.num_factor_slots, 2 // chunks
    # What enters the second product of the MLP, [slots, layers, B, T, 4 D].
    wide = rf"f32\[{slots},{layers},1,16,96\]"
    assert len(re.findall(rf"{wide}.* dynamic-update-slice\(|{wide}.*fusion\(", text)) > 0
    computations = re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \([^\n]*\{\n)", text)
    copying = [part for part in computations if re.search(rf"= {wide}\S* copy\(", part)]
    assert all(part.startswith("ENTRY") or re.match(r"%?main", part) for part in copying), [p[:40] for p in copying]
