"""What a pipeline costs, and what the executor costs where there is nothing to pipeline; a line of JSON for every case.

    python benchmarks/pipeline.py memory|overhead [train.py's flags] [--rounds N]

memory: temporary bytes of the compiled step on 4 stages, beside what the table predicts: the ring buffer (its slots x
the bytes a chunk keeps) and, where the head runs later than the layers, its inputs. `rest` is what is left:
accumulators, a stage's work.

overhead: loss and gradients on one device by the executor, against a hand-written loop around `jax.value_and_grad` of
the same model, in turn.
"""

import json
import time
from typing import Any

import numpy as np
import paired

from megajax.core.errors import UserError
from megajax.host.ending import run
from megajax.settings.config import Config
from megajax.settings.flags import parse
from megajax.start.launch import start


def _flags(layers: int, hidden: int, sequence: int, vocabulary: int, batch: int, dropout: float = 0.1) -> list[str]:
    sizes = f"--model.num-layers {layers} --model.hidden-size {hidden} --model.sequence-length {sequence}"
    others = f"--model.vocab-size {vocabulary} --model.dropout {dropout} --train.microbatch 1"
    return f"{sizes} {others} --train.global-batch {batch}".split()


CASES: dict[str, tuple[list[str], list[list[str]]]] = {  # what all cases have, and the cases
    "memory": (
        [*_flags(16, 256, 128, 2048, 8, dropout=0.0), "--mesh.pipe", "4", "--simulate-devices", "4"],
        [
            ["--pipeline.schedule", schedule, "--pipeline.chunks", chunks, "--train.global-batch", batch]
            for schedule, chunks in (("1f1b", "1"), ("interleaved", "2"), ("interleaved", "4"), ("gpipe", "1"))
            for batch in ("8", "32")
        ],
    ),
    "overhead": (
        _flags(4, 512, 512, 8192, 4),
        [
            ["--model.scan-layers", scan, "--train.remat", remat]
            for scan in ("true", "false")
            for remat in ("none", "layer")
        ],
    ),
}


def memory(program: Any, rounds: int) -> dict:
    """Compile one step and look at its memory."""
    from megajax.core.program.memory import residual_bytes
    from megajax.core.program.train_step import loss_and_gradients

    model = program.config.model
    compiled = loss_and_gradients(program).lower(*_types(program)).compile()
    temporary, chunk_bytes = compiled.memory_analysis().temp_size_in_bytes, residual_bytes(program)
    table = program.schedule
    outputs = 0 if table.turns_at_once else 4 * model.sequence_length * model.hidden_size
    predicted = table.num_slots * (chunk_bytes + outputs)
    found = {"slots": table.num_slots, "chunk_bytes": chunk_bytes, "temporary": temporary, "predicted": predicted}
    return found | {"rest": temporary - predicted}


def _types(program: Any) -> tuple[Any, Any, Any]:
    """Of the weights, a batch and a step."""
    import jax

    params = program.layout.shapes.params
    return params, program.batch_types, jax.ShapeDtypeStruct((), np.int32)


def _seconds(step: Any, arguments: tuple) -> float:
    import jax

    began = time.perf_counter()
    jax.block_until_ready(step(*arguments))
    return time.perf_counter() - began


def overhead(program: Any, rounds: int) -> dict:
    """Compile both loops, check that they agree, and measure them in turn."""
    from megajax.core.program.train_step import computed_weights, loss_and_gradients
    from megajax.data.synthetic import placed_batch

    arguments = computed_weights(program, program.layout.init()), placed_batch(program, 0), np.int32(0)
    loops = [loop.lower(*arguments).compile() for loop in (loss_and_gradients(program), hand_written(program))]
    np.testing.assert_allclose(*(loop(*arguments)[0] for loop in loops), rtol=1e-5)
    times = np.array([[_seconds(loop, arguments) for loop in loops] for _ in range(rounds)])
    temporary = [loop.memory_analysis().temp_size_in_bytes for loop in loops]
    ours, plain = np.median(times, axis=0)
    found = {"seconds": ours, "seconds_hand_written": plain, "time_ratio": np.median(times[:, 0] / times[:, 1])}
    return found | {"temp_bytes": temporary[0], "temp_ratio": temporary[0] / temporary[1]}


def hand_written(program: Any) -> Any:
    """The plain loop: value_and_grad of the whole model per microbatch, gradients added up in a scan."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import PartitionSpec as P

    from megajax.core.axes import BATCH_AXES, ROW_AXES
    from megajax.core.backend import CPU
    from megajax.core.mesh import ROWS, on_mesh
    from megajax.core.parallel.collectives import PIPE, sum_over, vary
    from megajax.core.parallel.random import Dropout
    from megajax.core.program.overlap import scans_layers

    config, model = program.config, program.model
    num_microbatches = config.train.global_batch // config.train.microbatch

    def region(params, batch, step):
        count = sum_over(jnp.sum(batch["targets"] >= 0), ROW_AXES)
        params = vary(params, (*BATCH_AXES, PIPE))

        def loss_of(params, microbatch):
            dropout = Dropout.at(config.model.dropout, config.seed, step, microbatch["row"])
            ends, context = model.ends(params["shared"]), model.context(microbatch, dropout)

            def layer(x, slot):
                weights, index = slot
                return model.layers[""].block(weights)(x, context, index)[0], None

            unroll = not scans_layers(config, CPU)
            if config.train.remat == "layer":
                layer = jax.checkpoint(layer, prevent_cse=unroll)
            x = ends.embed(microbatch, context)
            blocks = jax.tree.map(lambda w: w[0, 0], params["blocks"])
            x, _ = lax.scan(layer, x, (blocks, jnp.arange(config.model.num_layers)), unroll=unroll)
            return ends.losses(x, microbatch, context)["next_token"] / count.astype(x.dtype)

        def accumulate(carry, microbatch):
            loss, grads = jax.value_and_grad(loss_of)(params, microbatch)
            return jax.tree.map(jnp.add, carry, (loss, grads)), None

        batch = vary(batch | {"row": jnp.arange(config.train.global_batch)}, (*BATCH_AXES, PIPE))
        batch = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
        zeros = (vary(jnp.zeros(()), (*BATCH_AXES, PIPE)), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = lax.scan(accumulate, zeros, batch)
        grads = {
            "shared": sum_over(grads["shared"], (*BATCH_AXES, PIPE)),
            "blocks": sum_over(grads["blocks"], BATCH_AXES),
        }
        return sum_over(loss, (*BATCH_AXES, PIPE)), grads

    specs = program.layout.computed_specs
    rows = on_mesh(program.mesh, ROWS)
    mapped = jax.shard_map(region, mesh=program.mesh, in_specs=(specs, rows, P()), out_specs=(P(), specs))
    return jax.jit(mapped)


MEASURES = {"memory": memory, "overhead": overhead}


def work(what: str, config: Config, rounds: int) -> dict:
    """Measure one case in this process."""
    start(config)
    from megajax.core.program.program import Program

    named = {"pipeline": vars(config.pipeline), "remat": config.train.remat, "scan": config.model.scan_layers}
    return named | {"batch": config.train.global_batch} | MEASURES[what](Program.on(config), rounds)


def main() -> None:
    """Parse the command line, measure, print."""
    own, (what, *flags), usage = paired.own_flags(rounds=7)
    if what not in MEASURES:
        raise UserError(f"{what}; valid: {', '.join(MEASURES)}, then {usage}")
    shared, every = CASES[what]
    for case in every:
        found = work(what, parse([paired.DEFAULT, *shared, *case, *flags], ""), own.rounds)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    run(main)
