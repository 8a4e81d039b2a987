#!/usr/bin/env bash
# The first hour on one node of GPUs, 10 minutes: what its links reach beside the plan's rates, every axis of the mesh
# against one GPU for 3 steps, the fastest recipes. Writes docs/benchmarks/gpu-node-DATE.json and .md (or --out PREFIX).
#
#   benchmarks/gpu_node.sh [--part collectives|axes|recipes] [--device gpu|cpu] [--processes N] [--minutes N] [--out PREFIX]
#
# One process a GPU (deploy/each-gpu.sh), or --processes 1 for one process for all. Without GPUs: --device cpu (8 simulated
# devices, tiny models). It needs Python with jax[cuda13], flax, optax and numpy. Exit code 1: an axis is wrong, or failed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$PYTHON" benchmarks/gpu_node.py "$@"
