"""The norms of every layer's output and of its gradient in one step, on any mesh."""

from collections.abc import Iterator

import numpy as np

from megajax.core.program.program import Program
from megajax.core.program.train_step import computed_weights, loss_and_gradients
from megajax.training.loop import Trainer
from megajax.verify.recording import Recording

Norms = dict[int, tuple[str, float, float]]
"""By layer (-1: the head): the site that it computes last, and the norms there, forward and backward."""


def norms_of_layers(run: Trainer) -> Norms:
    """Those of the next step of a run, whose state stays as it is."""
    recording, size = Recording(), run.order.sizes.at(run.first).size
    program = run.program.with_batch(size)
    program = Program(program.config, program.mesh, program.backend, program.operand_dtype)  # nothing traced yet
    batch = program.put_batch(next(run.batches(run.program.rows_of)), program.rows_of(size))
    with recording.taken():
        loss_and_gradients(program)(computed_weights(run.program, run.state), batch, run.state.step)
    norms: Norms = {}
    for layer in sorted({place.layer for place in recording.places}):
        places = [place for place in recording.places if place.layer == layer and place.backward]
        last = max(places, key=lambda place: recording.turns[layer < 0, place.site])
        both = (last._replace(backward=False), last)
        squares = [[np.sum(np.square(x.value, dtype=np.float64)) for _, x in recording.activations(p)] for p in both]
        norms[layer] = last.site, *(float(np.sqrt(sum(each))) for each in squares)  # type: ignore[assignment]
    return norms


def beside(ours: Norms, theirs: Norms) -> Iterator[str]:
    """A line for every layer, with the norms on the run's own mesh and on the other one."""
    for layer, (site, *norms) in sorted(ours.items(), key=lambda each: (each[0] < 0, each[0])):
        both = [(x, y, abs(x - y) / max(x, y, 1e-300)) for x, y in zip(norms, theirs[layer][1:], strict=True)]
        pairs = [f"{x:.6g} and {y:.6g} ({off:.1e})" for x, y, off in both]
        where = "the head" if layer < 0 else f"layer {layer}"
        yield f"  {where}, {site}: {pairs[0]}; its gradient: {pairs[1]}"
