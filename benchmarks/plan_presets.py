"""How long `megajax plan` takes and how much memory, for every preset on three odd meshes; the range stands in
docs/benchmarks/planning.md.

Where a preset cannot have a mesh, the nearest that it can is taken. Seconds are of the whole command, processor seconds
of all its threads.

    python benchmarks/plan_presets.py [--presets NAME ...]
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megajax.core.config import MeshConfig
from megajax.settings.preset_files import preset_names
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import nearest_mesh

ROOT = Path(__file__).resolve().parents[1]
MESHES = (3, 2, 2), (2, 5, 4), (1, 3, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=preset_names())
    print("| preset | mesh | GiB a device, planned | seconds | processor seconds | GiB |\n|---|---|---|---|---|---|")
    for preset in parser.parse_args().presets:
        config = resolve(load_preset(preset))
        for data, pipe, tensor in MESHES:
            rows = 4 * data * config.train.microbatch
            train = dataclasses.replace(config.train, global_batch=rows)
            asked = MeshConfig(data=data, pipe=pipe, tensor=tensor)
            mesh = nearest_mesh(dataclasses.replace(config, train=train, mesh=asked))
            assert mesh is not None, preset
            flags = [f"--mesh.{axis}={size}" for axis, size in dataclasses.asdict(mesh).items()]
            command = [
                sys.executable,
                "-m",
                "megajax",
                "plan",
                preset,
                *flags,
                f"--train.global-batch={rows}",
                "--json",
            ]
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
            seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
            if done.returncode:
                sys.exit(f"{' '.join(command)}: {done.stderr[-2000:]}")
            found = json.loads(done.stdout.splitlines()[-1])
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            assert found["compiled"]["communication_as_predicted"], command
            print(
                f"| {preset} | {mesh.data}x{mesh.pipe}x{mesh.tensor} | {found['memory']['total'] / 2**30:.1f} | "
                f"{seconds:.0f} | {used:.0f} | {found['peak_bytes'] / 2**30:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
