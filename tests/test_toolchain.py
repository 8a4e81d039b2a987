"""Known faults of the toolchain, tried under the flags that the program sets.

On jaxlib 0.10.2 this fails with XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=+reduce, which takes the remedy away.
"""

import os
import subprocess
import sys

CANARIES = """
from megajax.settings.flags import parse
from megajax.settings.launch import start

start(parse(["demo", "--precision", "fp64"], "", ""))

import jax
import jax.numpy as jnp


def squares(dtype, rows):  # jax#39103: wrong sums
    x = jnp.stack([jnp.arange(rows, dtype=dtype)] + 2 * [jnp.zeros(rows, dtype)], axis=1)
    return jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3, dtype=dtype) @ row) ** 2)))(x)[-1]


def high_rank():  # jax#39257: a hang or a crash
    x, y = jnp.ones((10, 4, 6), jnp.float32), jnp.ones((10, 4, 6, 9, 9, 9, 9, 9), jnp.float32)
    return jnp.max(jax.jit(lambda x, y: jnp.log(jnp.sum(x[..., *5 * [None]] * y, axis=2)))(x, y))


def dim_of_one():  # jax#40412: a crash
    x = jnp.ones((3, 1, 2, 2, 8, 8, 8), jnp.float32)
    return jnp.max(jax.jit(lambda x, y: jnp.sum(x * y, axis=3))(x, x))


print("fp64", squares(jnp.float64, 16_385) == 16_384**2, flush=True)
print("fp32", squares(jnp.float32, 32_769) == 32_768**2, flush=True)
print("high rank", abs(high_rank() - 1.7917595) < 1e-6, flush=True)
print("dim of one", dim_of_one() == 2, flush=True)
"""


def test_known_faults_of_jaxlib_do_not_show():
    """In a process of its own, since some of the faults end it, and with the optimisation that users get."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "ynn_fusion_type" in flag and "=-" not in flag]
    done = subprocess.run(
        [sys.executable, "-c", CANARIES],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)},
    )
    expected = ["fp64 True", "fp32 True", "high rank True", "dim of one True"]
    assert (done.stdout.splitlines(), done.returncode) == (expected, 0), done.stderr[-2000:]
