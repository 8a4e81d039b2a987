# shellcheck shell=bash
# For the scripts beside it, which source it: the repository's root as the current folder, PYTHON, and a folder for what JAX compiles.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-${TMPDIR:-/tmp}/megajax-compilation-cache}"
