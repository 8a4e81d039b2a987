"""A training step on one GPU: its time and, with --trace, its kernels.

    python benchmarks/gpu_kernels.py PRESET [train.py's flags] [--steps N] [--trace FOLDER]

One batch of random tokens; as in training, a step is awaited after the next one has started. Prints a line of JSON:
seconds to compile, milliseconds of every step, model FLOP/s, and the most memory in use. With --trace, two further
steps are traced: FOLDER/kernels.txt has milliseconds and launches a step of every kernel, most time first, and
FOLDER/step.hlo the compiled program that names most of them; the gaps between kernels are printed. The times are then
those of kernels that start one by one, and not as a graph.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paired import parse_own
from throughput import compiled_step

from megajax.core.errors import UserError
from megajax.core.models.family import step_flops
from megajax.host.ending import run
from megajax.settings.config import Config
from megajax.settings.flags import parse
from megajax.start.launch import start

PEAK = 989e12  # dense bf16 FLOP/s of an H100 or H200, by the data sheet
TRACED = 2  # steps


def measure(config: Config, steps: int, folder: Path | None) -> dict:
    """The figures; kernels go into the folder, if there is one."""
    if folder is not None:
        config = dataclasses.replace(config, profile="1")  # kernels one by one, not as a graph
    start(config)
    import jax

    _, compiled, state, batch, compile_seconds = compiled_step(config)

    def seconds(count: int) -> list[float]:
        nonlocal state
        ends, waiting = [time.perf_counter()], None
        for _ in range(count):
            state, metrics = compiled(state, batch)
            if waiting is not None:
                waiting.block_until_ready()
                ends.append(time.perf_counter())
            waiting = metrics["loss"]
        jax.block_until_ready(state)
        return [end - begin for begin, end in zip(ends, [*ends[1:], time.perf_counter()], strict=True)]

    seconds(2)
    found = seconds(steps)
    typical, device = statistics.median(found), jax.local_devices()[0]
    flops = step_flops(config.model, config.train.global_batch) / config.mesh.num_devices
    tokens = config.train.global_batch * config.model.sequence_length
    figures = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "compile_seconds": compile_seconds,
        "milliseconds": [1e3 * each for each in found],
        "tokens_per_second": tokens / typical,
        "tflops": flops / typical / 1e12,
        "mfu": flops / typical / PEAK,
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use", 0),
    }
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "step.hlo").write_text(compiled.as_text())
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = options.host_tracer_level = 0
        jax.profiler.start_trace(folder, profiler_options=options)
        seconds(TRACED)
        jax.profiler.stop_trace()
        figures |= kernels(folder)
    return figures


def kernels(folder: Path) -> dict:
    """Write the kernels of the folder's last trace; milliseconds a step of kernels, and of gaps between them."""
    import jax

    *_, last = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    planes = jax.profiler.ProfileData.from_file(str(last)).planes
    lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
    events = sorted(
        (each.start_ns, each.start_ns + each.duration_ns, each.name) for line in lines for each in line.events
    )
    if not events:
        raise UserError(f"--trace {folder}: the trace has no kernels; valid: on a GPU")
    own: dict[str, list[float]] = defaultdict(list)
    busy, end = 0.0, 0.0
    for begin, until, name in events:
        own[name].append((until - begin) / 1e6 / TRACED)
        busy, end = busy + max(0.0, until - max(begin, end)), max(end, until)
    rows = sorted(own.items(), key=lambda item: -sum(item[1]))
    text = "".join(f"{sum(each):9.3f} ms {len(each) / TRACED:7.1f}  {name}\n" for name, each in rows)
    (folder / "kernels.txt").write_text(text)
    span = end - events[0][0]
    return {"kernel_milliseconds": busy / 1e6 / TRACED, "gap_milliseconds": (span - busy) / 1e6 / TRACED}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--trace", type=Path)
    own, flags = parse_own(parser)
    config = parse(flags, str(__doc__).partition("\n")[0], "gpu_kernels.py PRESET [--steps N] [--trace FOLDER]")
    print(json.dumps(measure(config, own.steps, own.trace)))


if __name__ == "__main__":
    run(main)
