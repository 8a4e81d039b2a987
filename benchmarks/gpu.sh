#!/usr/bin/env bash
# Every benchmark of one GPU in one command, 10 minutes at most: writes docs/benchmarks/gpu-DATE.json and .md (or --out PREFIX).
# It needs Python with jax[cuda13], flax, optax, numpy and torch. Without a GPU: benchmarks/gpu.sh --device cpu (a tiny model).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$PYTHON" benchmarks/gpu.py "$@"
