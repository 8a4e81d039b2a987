"""What the schedules keep in memory: temporary bytes of the compiled step, beside what the table predicts.

The prediction is the ring buffer (the table's slots x the bytes a chunk keeps) and, where the head runs later than the
layers, its inputs. `rest` is what is left of the temporaries: accumulators, a stage's work. Prints a line of JSON each.

    python benchmarks/pipeline_memory.py [--pipe 4 --hidden 256 --layers 16 --microbatches 8 32]
"""

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

from megajax.core.config import MeshConfig
from megajax.core.mesh import make_mesh
from megajax.core.models.config import ModelConfig
from megajax.core.optim.config import OptimizerConfig
from megajax.core.pipeline.config import PipelineConfig
from megajax.core.program.memory import residual_bytes
from megajax.core.program.program import Program
from megajax.core.program.train_step import loss_and_gradients
from megajax.settings.config import Config, TrainConfig
from megajax.start.launch import avoid_known_faults

CASES = [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("gpipe", 1)]


def figures(args: argparse.Namespace, schedule: str, chunks: int, remat: str, num_microbatches: int) -> dict:
    """Compile one step and look at its memory."""
    config = Config(
        model=ModelConfig(
            num_layers=args.layers, hidden_size=args.hidden, num_heads=args.heads, sequence_length=args.sequence,
            vocab_size=args.vocabulary,
        ),
        mesh=MeshConfig(pipe=args.pipe),
        pipeline=PipelineConfig(schedule=schedule, chunks=chunks),
        train=TrainConfig(steps=1, global_batch=num_microbatches, microbatch=1, remat=remat),
        optimizer=OptimizerConfig(learning_rate=1e-3, decay_steps=10),
    )  # fmt: skip
    program = Program(config, make_mesh(jax.devices()[: args.pipe], pipe=args.pipe))
    params = jax.eval_shape(program.layout.init).params
    batch = {name: jax.ShapeDtypeStruct((num_microbatches, args.sequence), "int32") for name in ("tokens", "targets")}
    compiled = loss_and_gradients(program).lower(params, batch, jax.ShapeDtypeStruct((), "int32")).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    chunk_bytes = residual_bytes(program)
    table = program.schedule
    outputs = 0 if table.turns_at_once else 4 * math.prod((args.sequence, args.hidden))
    predicted = table.num_slots * (chunk_bytes + outputs)
    return {
        "schedule": schedule, "chunks": chunks, "remat": remat, "microbatches": num_microbatches,
        "slots": table.num_slots, "chunk_bytes": chunk_bytes, "temporary": temporary, "predicted": predicted,
        "rest": temporary - predicted,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"pipe": 4, "hidden": 256, "layers": 16, "heads": 8, "sequence": 128, "vocabulary": 2048}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--remat", nargs="+", default=["none"])
    args = parser.parse_args()
    avoid_known_faults()
    jax.config.update("jax_num_cpu_devices", args.pipe)
    for remat in args.remat:
        for schedule, chunks in CASES:
            for num_microbatches in args.microbatches:
                print(json.dumps(figures(args, schedule, chunks, remat, num_microbatches)), flush=True)


if __name__ == "__main__":
    main()
