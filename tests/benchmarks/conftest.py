"""The benchmarks are scripts beside each other, not a package: their folder is where their tests import from."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
