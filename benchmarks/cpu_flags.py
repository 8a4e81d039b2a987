"""A training step on CPUs under several settings of XLA's flags, paired: A B A B.

    python benchmarks/cpu_flags.py [PRESET] [train.py's flags] [--with=FLAGS ...] [--rounds N] [--steps N] [--json]

PRESET is benchmarks/gpt-4x512.toml unless given. `--with` takes one set of flags in quotes and may be repeated; without
it: XLA's defaults, no reductions in YNNPACK, nothing in YNNPACK. CPU seconds hold better than wall seconds where other
jobs run on the machine. A ratio is the first set's seconds by another's: above 1 the other is faster.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paired import Side, in_turn_with_cpu, parse_own
from throughput import DEFAULT

from megajax.host.ending import run
from megajax.settings.flags import parse

YNN = "--xla_cpu_experimental_ynn_fusion_type"
BENCHMARKS = Path(__file__).resolve().parent


def main() -> None:
    """Parse the command line, measure, print the table."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--with", dest="sets", action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    own, flags = parse_own(parser)
    if not flags or flags[0].startswith("--"):
        flags = [DEFAULT, *flags]
    parse(flags, str(__doc__).partition("\n")[0], "cpu_flags.py")
    # XLA's own default is an empty change of its list: given by the user, the program leaves it alone.
    sets = own.sets or [f"{YNN}=+individual_dot", f"{YNN}=-reduce", f"{YNN}="]
    sides: list[Side] = []
    try:
        for xla_flags in sets:
            print(f"[{xla_flags}]: compiling and warming up", file=sys.stderr)
            command = [sys.executable, str(BENCHMARKS / "throughput.py"), *flags, "--serve"]
            sides.append(Side(xla_flags, [command], environment={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags}))
        wall, cpu = in_turn_with_cpu(sides, own.rounds, own.steps)
        peaks = [side.ask("memory")["peak_bytes"] / 2**20 for side in sides]
    finally:
        for side in sides:
            side.close()
    print("| flags | s a step | CPU s a step | ratio | CPU ratio | warm-up s | peak MiB | second loss |")
    print("|---|---|---|---|---|---|---|---|")
    for side, of_wall, of_cpu, peak in zip(sides, wall, cpu, peaks, strict=True):
        seconds, of_both = statistics.median(of_wall), statistics.median(of_cpu)
        ratio = statistics.median(a / b for a, b in zip(wall[0], of_wall, strict=True))
        cpu_ratio = statistics.median(a / b for a, b in zip(cpu[0], of_cpu, strict=True))
        print(
            f"| `{side.name}` | {seconds:.3f} | {of_both:.3f} | {ratio:.3f} | {cpu_ratio:.3f} "
            f"| {side.about['warm_up_seconds']:.0f} | {peak:.0f} | {side.about['losses'][-1]:.7f} |"
        )
    if own.json:
        print(json.dumps({"sets": sets, "wall": wall, "cpu": cpu, "peaks": peaks}))


if __name__ == "__main__":
    run(main)
