"""Does a pipe take the time that its schedule's table predicts? Two stages as two processes, each pinned to one core.

Every stage is measured alone, then the whole step; the prediction is the table with the stages' own times. Prints a
line of JSON per schedule: seconds, and `ratio` = measured / predicted.

    python benchmarks/pipeline_time.py [--hidden 512 --layers 8 --microbatches 16]
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megajax.config import Config, DistributedConfig, MeshConfig, TrainConfig
from megajax.models.config import ModelConfig
from megajax.optim.config import OptimizerConfig
from megajax.pipeline.config import PipelineConfig

CASES = [("1f1b", 1, "replicated"), ("interleaved", 2, "replicated"), ("gpipe", 1, "replicated"), ("1f1b", 1, "split")]


def work(args: argparse.Namespace, process: int) -> None:
    """One process: measure, and print the figures if it is the first."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[process]})
    schedule, chunks, vocabulary = CASES[args.case]
    config = Config(
        model=ModelConfig(
            num_layers=args.layers, hidden_size=args.hidden, num_heads=args.heads, sequence_length=args.sequence,
            vocab_size=args.vocabulary, dropout=args.dropout,
        ),
        mesh=MeshConfig(pipe=2),
        pipeline=PipelineConfig(schedule=schedule, chunks=chunks, vocabulary=vocabulary),
        train=TrainConfig(steps=1, global_batch=args.microbatches, microbatch=1, remat=args.remat),
        optimizer=OptimizerConfig(learning_rate=1e-3, decay_steps=10),
        distributed=DistributedConfig(coordinator=args.coordinator, num_processes=2, process_id=process),
    )  # fmt: skip
    from megajax.launch import start

    start(config)
    from megajax.mesh import make_mesh
    from megajax.program.program import Program
    from megajax.training.profile import measure

    found = measure(Program(config, make_mesh(1, 2, 1)))
    if process == 0:
        times = {
            name: getattr(value, "tolist", lambda value=value: value)() for name, value in vars(found.times).items()
        }
        figures = {"schedule": schedule, "chunks": chunks, "vocabulary": vocabulary, "remat": args.remat}
        figures |= {"microbatches": args.microbatches, "measured": found.step, "predicted": found.predicted}
        figures |= {"predicted_with_hand_over": found.predicted_with_hand_over, "ratio": found.step / found.predicted}
        figures |= {
            "ratio_with_hand_over": found.step / found.predicted_with_hand_over,
            "bubble": found.bubble,
            "equal_bubble": found.equal_bubble,
        }
        print(json.dumps(figures | {"times": times}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"hidden": 512, "layers": 8, "heads": 8, "sequence": 256, "vocabulary": 8192, "microbatches": 16}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("this measurement needs two cores")
    if args.process is not None:
        work(args, args.process)
        return
    for case in range(len(CASES)):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            coordinator = f"localhost:{free.getsockname()[1]}"
        command = [sys.executable, __file__, *sys.argv[1:], "--coordinator", coordinator, "--case", str(case)]
        processes = [
            subprocess.Popen([*command, "--process", str(i)], stdout=None if i == 0 else subprocess.DEVNULL)
            for i in range(2)
        ]
        while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
            time.sleep(0.2)
        if any(process.poll() != 0 for process in processes):
            for process in processes:
                process.kill()
            sys.exit(f"{command[2:]}: a process failed")


if __name__ == "__main__":
    main()
