"""What the pipeline executor costs where there is nothing to pipeline.

Mesh (1, 1, 1): loss and gradients of one step by the executor, against a hand-written accumulation loop around
`jax.value_and_grad` of the same model. Paired runs A B A B; prints the median ratio of times and the ratio of the
compiled programs' peak temporary bytes.

    python benchmarks/executor_overhead.py [--hidden 512 --layers 4 --microbatches 4 --rounds 7]
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from sys import path

path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.core.axes import BATCH_AXES, ROW_AXES
from megajax.core.backend import CPU
from megajax.core.config import MeshConfig
from megajax.core.mesh import ROWS, make_mesh
from megajax.core.models.config import ModelConfig
from megajax.core.optim.config import OptimizerConfig
from megajax.core.parallel.collectives import PIPE, sum_over, vary
from megajax.core.parallel.random import Dropout
from megajax.core.program.program import Program, scans_layers
from megajax.core.program.train_step import loss_and_gradients
from megajax.settings.config import Config, TrainConfig
from megajax.start.launch import avoid_known_faults


def hand_written(program: Program):
    """The plain loop: value_and_grad of the whole model per microbatch, gradients added up in a scan."""
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
                return model.block(weights)(x, context, index)[0], None

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

        batch = batch | {"row": jnp.arange(config.train.global_batch)}
        batch = vary(batch, (*BATCH_AXES, PIPE))
        batch = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
        zeros = (vary(jnp.zeros(()), (*BATCH_AXES, PIPE)), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = lax.scan(accumulate, zeros, batch)
        grads = {
            "shared": sum_over(grads["shared"], (*BATCH_AXES, PIPE)),
            "blocks": sum_over(grads["blocks"], BATCH_AXES),
        }
        return sum_over(loss, (*BATCH_AXES, PIPE)), grads

    specs = program.layout.specs.params
    mapped = jax.shard_map(region, mesh=program.mesh, in_specs=(specs, ROWS, P()), out_specs=(P(), specs))
    return jax.jit(mapped)


def compare(program: Program, rounds: int) -> dict:
    """Compile both, check that they agree, and measure them in turn."""
    config = program.config
    params = program.layout.init().params
    tokens = np.random.default_rng(0).integers(
        0, config.model.vocab_size, (config.train.global_batch, config.model.sequence_length + 1), np.int32
    )
    batch = program.put_batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, program.local_rows)
    step = jnp.zeros((), jnp.int32)
    ours = loss_and_gradients(program).lower(params, batch, step).compile()
    plain = hand_written(program).lower(params, batch, step).compile()
    np.testing.assert_allclose(ours(params, batch, step)[0], plain(params, batch, step)[0], rtol=1e-5)
    times: dict = {ours: [], plain: []}
    for _ in range(rounds):
        for compiled in times:
            start = time.perf_counter()
            jax.block_until_ready(compiled(params, batch, step))
            times[compiled].append(time.perf_counter() - start)
    temp = [compiled.memory_analysis().temp_size_in_bytes for compiled in (ours, plain)]
    return {
        "remat": config.train.remat,
        "scan_layers": scans_layers(config, CPU),
        "seconds": statistics.median(times[ours]),
        "seconds_hand_written": statistics.median(times[plain]),
        "time_ratio": statistics.median(a / b for a, b in zip(times[ours], times[plain], strict=True)),
        "temp_bytes": temp[0],
        "temp_ratio": temp[0] / temp[1],
    }


def main() -> None:
    avoid_known_faults()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "hidden": 512, "layers": 4, "heads": 8, "sequence": 512, "vocabulary": 8192, "microbatches": 4, "rounds": 7
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.1)
    args = parser.parse_args()
    for scan in ("true", "false"):
        for remat in ("none", "layer"):
            config = Config(
                model=ModelConfig(
                    num_layers=args.layers, hidden_size=args.hidden, num_heads=args.heads,
                    sequence_length=args.sequence, vocab_size=args.vocabulary, dropout=args.dropout, scan_layers=scan,
                ),
                mesh=MeshConfig(),
                train=TrainConfig(steps=1, global_batch=args.microbatches, microbatch=1, remat=remat),
                optimizer=OptimizerConfig(learning_rate=1e-3, decay_steps=10),
            )  # fmt: skip
            program = Program(config, make_mesh(jax.devices()[:1]))
            print(json.dumps(compare(program, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
