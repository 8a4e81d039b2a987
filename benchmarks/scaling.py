"""The paper's scaling studies (arXiv 1909.08053, §5.1 and appendix D), on real GPUs or, without any, on simulated ones.

    python benchmarks/scaling.py [--study weak-model weak-data strong heads pipeline] [--measure] [--json]

On simulated devices nothing runs: every step is traced for its mesh, and what a device sends, holds and waits for is
counted. `--measure` runs the cases that the GPUs of this machine suffice for and adds time and efficiency. Prints a
table; with --json also one JSON object as its last line.

Sent are the bytes of ring algorithms: of an all-reduce of b bytes over n devices 2 b (n - 1) / n. State is weights,
optimizer and gradient sums; kept is what the backward pass needs of the microbatches under way, layers recomputed. The
bubble is the time lost to an unevenly filled pipe by that of a full one, a backward counted as two forwards.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass

from throughput import step_seconds

from megajax.settings.config import Config
from megajax.settings.presets import load_preset, resolve
from megajax.start.launch import avoid_known_faults


@dataclass(frozen=True)
class Case:
    """One configuration of a study. `paper` is the paper's efficiency, or for `strong` its speed-up, on V100s."""

    study: str
    preset: str
    mesh: tuple[int, int, int]  # data, pipe, tensor
    batch: int
    heads: int | None = None
    chunks: int = 1
    paper: float | None = None

    def config(self) -> Config:
        """The preset on this case's mesh; microbatches of 8 rows, with a pipe of 1."""
        data, pipe, tensor = self.mesh
        overrides = {
            "mesh.data": data,
            "mesh.pipe": pipe,
            "mesh.tensor": tensor,
            "train.global_batch": self.batch,
            "train.microbatch": 8 if pipe == 1 else 1,
            "train.remat": "layer",
            "model.scan_layers": "true",
            "model.dropout": 0.0,
            "pipeline.chunks": self.chunks,
            "pipeline.schedule": "interleaved" if self.chunks > 1 else "1f1b",
        }
        if self.heads:
            overrides["model.num_heads"] = self.heads
        return resolve(load_preset(self.preset), overrides)


MODELS = ["gpt2-1.2b", "gpt2-2.5b", "gpt2-4.2b", "gpt2-8.3b"]  # 1, 2, 4 and 8 GPUs to a model (table 1)
CASES = [
    *(
        Case("weak-model", model, (1, 1, 2**i), 8, paper=p)
        for i, (model, p) in enumerate(zip(MODELS, (1, None, None, 0.77), strict=True))
    ),
    *(
        Case("weak-data", model, (64, 1, 2**i), 512, paper=p)
        for i, (model, p) in enumerate(zip(MODELS, (None, None, None, 0.74), strict=True))
    ),
    *(Case("strong", MODELS[0], (1, 1, n), 8, paper=p) for n, p in ((1, 1.0), (2, 1.64), (4, 2.34), (8, 2.98))),
    *(Case("heads", MODELS[3], (1, 1, 8), 8, heads=n, paper=p) for n, p in ((16, 0.82), (24, 0.80), (32, 0.77))),
    *(Case("pipeline", MODELS[3], mesh, 64, chunks=v) for mesh, v in (((1, 1, 8), 1), ((1, 2, 4), 1), ((1, 2, 4), 2))),
    *(Case("pipeline", MODELS[3], mesh, 64, chunks=v) for mesh, v in (((1, 4, 2), 1), ((1, 4, 2), 3), ((1, 8, 1), 1))),
]


def sent_bytes(program) -> dict[str, float]:
    """Bytes that a device sends in a step, by mesh axes."""
    import jax

    from megajax.core.program.train_step import train_step
    from megajax.verify import collectives

    sizes = dict(program.mesh.shape)
    batch_shape = program.config.train.global_batch, program.config.model.sequence_length
    batch = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct(batch_shape, "int32"))
    sent: Counter = Counter()
    for one in collectives(train_step(program), program.layout.shapes, batch):
        n = 1
        for axis in one.axes:
            n *= sizes[axis]
        axes = " x ".join(axis for axis in one.axes if sizes[axis] > 1)
        if n > 1:
            sent[axes] += one.count * one.bytes_sent(n)
    return dict(sent)


def count(case: Case, devices) -> dict:
    """What a case's step sends, holds and waits for."""
    from megajax.core.mesh import make_mesh
    from megajax.core.models.flops import step_flops
    from megajax.core.models.staged import count_parameters
    from megajax.core.pipeline.timing import step_time
    from megajax.core.program.memory import residual_bytes, state_bytes
    from megajax.core.program.program import Program

    config = case.config()
    program = Program(config, make_mesh(devices[: config.mesh.num_devices], **config.mesh.on_devices))
    slots = 1 if program.schedule.fused else program.schedule.num_slots
    sent = sent_bytes(program)
    return {
        "study": case.study,
        "model": case.preset,
        "heads": config.model.num_heads,
        "parameters": count_parameters(config.model),
        "gpus": config.mesh.num_devices,
        "mesh": list(case.mesh),
        "batch": case.batch,
        "chunks": case.chunks,
        "tflop": step_flops(config.model, case.batch) / config.mesh.num_devices / 1e12,
        "sent_gb": {axes: size / 1e9 for axes, size in sent.items()},
        "state_gib": sum(state_bytes(program).values()) / 2**30,
        "kept_gib": slots * residual_bytes(program) / 2**30,
        "bubble": step_time(program.schedule).bubble,
        "paper": case.paper,
    }


def measure(case: Case, devices, steps: int = 5) -> dict:
    """Seconds of a case's step on these GPUs, and the model FLOP/s of each."""
    from megajax.core.mesh import make_mesh
    from megajax.core.models.flops import step_flops
    from megajax.core.program.program import Program

    config = case.config()
    program = Program(config, make_mesh(devices[: config.mesh.num_devices], **config.mesh.on_devices))
    typical = step_seconds(program, steps, warm_up=2)
    flops = step_flops(config.model, case.batch) / config.mesh.num_devices / typical
    return {"seconds": typical, "tflops_per_gpu": flops / 1e12}


def table(rows: list[dict]) -> str:
    """The cases as a Markdown table."""
    measured = any("seconds" in row for row in rows)
    head = ["study", "model", "heads", "data, pipe, tensor", "batch", "TFLOP a GPU", "GB sent a GPU, by axis"]
    head += ["state GiB", "kept GiB", "bubble", "paper"] + (["ms", "TFLOP/s a GPU", "efficiency"] if measured else [])
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    first: dict[str, dict] = {}
    for row in rows:
        sent = ", ".join(f"{axes} {size:.3g}" for axes, size in sorted(row["sent_gb"].items()) if size >= 5e-4) or "0"
        cells = [row["study"], row["model"], row["heads"], ", ".join(map(str, row["mesh"])), row["batch"]]
        cells[3] += f"; {row['chunks']} chunks" if row["chunks"] > 1 else ""
        cells += [f"{row['tflop']:,.0f}", sent, f"{row['state_gib']:.1f}", f"{row['kept_gib']:.2f}"]
        cells += [f"{row['bubble']:.1%}", "" if row["paper"] is None else row["paper"]]
        if measured and "seconds" in row:
            base = first.setdefault(row["study"], row)
            cells += [f"{row['seconds'] * 1e3:.1f}", f"{row['tflops_per_gpu']:.1f}"]
            cells += [f"{row['tflops_per_gpu'] / base['tflops_per_gpu']:.1%}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, go through the cases, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    studies = list(dict.fromkeys(case.study for case in CASES))
    parser.add_argument("--study", nargs="+", choices=studies, default=studies)
    parser.add_argument("--measure", action="store_true", help="also run what the GPUs of this machine suffice for")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cases = [case for case in CASES if case.study in args.study]
    avoid_known_faults()
    import jax

    jax.config.update("jax_platforms", "cuda,cpu" if args.measure else "cpu")
    jax.config.update("jax_num_cpu_devices", max(case.config().mesh.num_devices for case in cases))
    gpus = []
    if args.measure:
        try:
            gpus = jax.devices("gpu")
        except RuntimeError as error:
            sys.exit(
                f"--measure: JAX finds no GPU here ({str(error).splitlines()[0]}); without it the cases are counted"
            )
    rows = []
    for case in cases:
        row = count(case, jax.devices("cpu"))
        if case.config().mesh.num_devices <= len(gpus):
            row |= measure(case, gpus)
        rows.append(row)
        print(json.dumps(row), file=sys.stderr)
    print(table(rows))
    if args.json:
        print(json.dumps({"jax": jax.__version__, "cases": rows}))


if __name__ == "__main__":
    main()
