"""`python tests/mutants/try_apart.py [TEXT ...]` plants the mutants that are wrong alike on every mesh, or outside the
step, and runs the tests that catch them; and those that are equivalent, whose configurations must pass."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from apart import ALIKE, EQUIVALENT, OUTSIDE, Apart
from mutant import ON_DATA, ON_PIPE, ON_SEQUENCE, ON_TENSOR, Mutant
from planting import ROOT, plant
from trial import import_what_is_slow, try_all

MESHES = [ON_DATA, ON_PIPE | {"global_batch": 8}, ON_TENSOR, ON_SEQUENCE, {"mesh": (2, 2, 2)}]


def planted(apart: Apart) -> Mutant:
    """As a mutant that nothing should be found of."""
    return Mutant(apart.name, apart.old, apart.new, {}, "numbers")


def failing_tests(apart: Apart) -> bool:
    """Whether its tests fail, in a process of their own."""
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1] != 0
    plant(planted(apart))
    import pytest

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *apart.why.split()])
    os._exit(0 if status != pytest.ExitCode.TESTS_FAILED else 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names or [""]
    os.chdir(ROOT)
    import_what_is_slow()
    for apart in [*ALIKE, *OUTSIDE]:
        if any(name in apart.name for name in names):
            began = time.monotonic()
            caught = failing_tests(apart)
            print(f"{'caught' if caught else '! MISSED':10}{time.monotonic() - began:5.0f} s  {apart.name}", flush=True)
    chosen = [apart for apart in EQUIVALENT if any(name in apart.name for name in names)]
    with tempfile.TemporaryDirectory() as folder:
        trials = [(apart.name, planted(apart), mesh) for apart in chosen for mesh in MESHES]
        for outcome in try_all(trials, Path(folder)):
            print(
                f"{'equivalent' if outcome.way == 'nothing' else '! ' + outcome.way:12}{outcome.name}: {outcome.said}"
            )


if __name__ == "__main__":
    main()
