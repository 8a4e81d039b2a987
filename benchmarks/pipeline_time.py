"""Does a pipe take the time that its schedule's table predicts? Two stages as two processes, each pinned to one core.

Every stage is measured alone, then the whole step; the prediction is the table with the stages' own times. Prints a
line of JSON per schedule: seconds, and `ratio` = measured / predicted.

    python benchmarks/pipeline_time.py [--hidden 512 --layers 8 --microbatches 16]

With `--deferred`: is a step with deferred weight gradients as much faster than one without as the tables say? Both are
compiled beforehand and run in turn in the same processes, first one, then the other first, and between them all passes.
Prints the median of the rounds' ratios beside the ratio that the tables give for the passes' means.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megajax.core.config import MeshConfig
from megajax.core.models.config import ModelConfig
from megajax.core.optim.config import OptimizerConfig
from megajax.core.pipeline.config import PipelineConfig
from megajax.host.ending import run
from megajax.settings.config import Config, DistributedConfig, TrainConfig

CASES = [("1f1b", 1, "replicated"), ("interleaved", 2, "replicated"), ("gpipe", 1, "replicated"), ("1f1b", 1, "split")]
DEFERRED_CASES = CASES[:2]
PAIRS = 4  # of steps with and without, in every round


def work(args: argparse.Namespace, process: int) -> None:
    """One process: measure, and print the figures if it is the first."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[process]})
    schedule, chunks, vocabulary = CASES[args.case]
    figures = {"schedule": schedule, "chunks": chunks, "vocabulary": vocabulary, "remat": args.remat}
    figures |= {"microbatches": args.microbatches}
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
    from megajax.start.launch import start

    start(config)
    from megajax.core.mesh import make_mesh
    from megajax.core.program.program import Program

    program = Program(config, make_mesh(pipe=2))
    figures |= compare(program, args.rounds) if args.deferred else alone(program)
    if process == 0:
        print(json.dumps(figures), flush=True)


def alone(program: Any) -> dict:
    """The step of a configuration beside its prediction."""
    from megajax.training.pipeline_timing import measure

    found = measure(program)
    return {
        "measured": found.step,
        "predicted": found.predicted,
        "predicted_with_transfers": found.predicted_with_transfers,
        "ratio": found.step / found.predicted,
        "ratio_with_transfers": found.step / found.predicted_with_transfers,
        "bubble": found.bubble,
        "equal_bubble": found.equal_bubble,
        "times": named(found.times),
    }


def compare(program: Any, rounds: int) -> dict:
    """A step with deferred weight gradients beside one without, and beside the prediction of their ratio."""
    import jax
    import numpy as np

    from megajax.core.pipeline.timing import StageTimes, wall_time
    from megajax.core.program.synthetic import placed_batch
    from megajax.core.program.train_step import loss_and_gradients
    from megajax.training.pipeline_timing import Passes, with_weight_gradients

    programs = {when: with_weight_gradients(program, when) for when in ("together", "deferred")}
    params, batch, first_step = program.layout.init().params, placed_batch(program, 0), np.int32(0)
    steps = {when: loss_and_gradients(p).lower(params, batch, first_step).compile() for when, p in programs.items()}

    def seconds(when: str) -> float:
        began = time.perf_counter()
        jax.block_until_ready(steps[when](params, batch, first_step))
        return time.perf_counter() - began

    def one_round(number: int) -> dict[str, Any]:
        """The times of `PAIRS` pairs of steps, and those of the passes, measured in their middle."""
        pairs = []
        for pair in range(PAIRS):
            if pair == PAIRS // 2:
                together, apart = passes.measure(1)
            first, second = sorted(steps, reverse=(number + pair) % 2 == 0)
            measured = {first: seconds(first)}
            measured[second] = seconds(second)
            pairs.append(measured)
        assert apart is not None
        return {"pairs": pairs, "times": {"together": together, "deferred": apart}}

    for when in steps:
        seconds(when)
    passes = Passes(program, params, batch)
    passes.measure(1)  # the first time takes longer
    found = [one_round(number) for number in range(rounds)]

    def mean(when: str) -> StageTimes:
        """Of every pass over the rounds. Not the median: a step has many passes, those that something disturbed too."""
        rows = [vars(each["times"][when]) for each in found]
        return StageTimes(**{name: np.mean([row[name] for row in rows], axis=0) for name in rows[0]})

    times = {when: mean(when) for when in programs}
    predicted = {when: wall_time(programs[when].schedule, times[when]) for when in programs}
    pairs = [pair for each in found for pair in each["pairs"]]
    ratios = [pair["deferred"] / pair["together"] for pair in pairs]
    measured, expected = statistics.median(ratios), predicted["deferred"] / predicted["together"]
    return {
        "measured_seconds": {when: statistics.median(pair[when] for pair in pairs) for when in programs},
        "predicted_seconds": predicted,
        "ratio": measured,
        "predicted_ratio": expected,
        "ratio_over_predicted": measured / expected,
        "ratios": ratios,
        "load": os.getloadavg()[0],
        "times": {when: named(times[when]) for when in programs},
    }


def named(times: Any) -> dict:
    """The fields of stages' times, as JSON has them."""
    return {name: getattr(value, "tolist", lambda value=value: value)() for name, value in vars(times).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"hidden": 512, "layers": 8, "heads": 8, "sequence": 256, "vocabulary": 8192, "microbatches": 16}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--deferred", action="store_true", help="weight gradients deferred beside together")
    parser.add_argument("--rounds", type=int, default=12, help="with --deferred")
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("this measurement needs two cores")
    if args.process is not None:
        run(lambda: work(args, args.process))  # the first process is the last to go
    for case in range(len(DEFERRED_CASES if args.deferred else CASES)):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            coordinator = f"localhost:{free.getsockname()[1]}"
        command = [sys.executable, __file__, *sys.argv[1:], "--coordinator", coordinator, "--case", str(case)]
        processes = [
            subprocess.Popen([*command, "--process", str(i)], stdout=None if i == 0 else subprocess.DEVNULL)
            for i in range(2)
        ]
        first, second = processes
        while first.poll() is None and not second.poll():
            time.sleep(0.2)
        failed = first.poll() != 0
        if not failed:  # the figures are printed; the second may lose its coordinator while it ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                second.wait(timeout=10)
        for process in processes:
            process.kill()
        if failed:
            sys.exit(f"{command[2:]}: a process failed")


if __name__ == "__main__":
    main()
