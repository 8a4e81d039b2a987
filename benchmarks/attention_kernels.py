"""The kernels of attention, compiled for an H200 on a machine without a GPU, with an estimate of their speed.

    python benchmarks/attention_kernels.py [--sizes 64 96 128 256] [--rates 0 0.1] [--json FILE]

It needs JAX's CUDA packages and nvdisasm (`pip install 'jax[cuda13]' nvidia-cuda-nvdisasm`). Registers, spills and
shared memory are what JAX's own compilation says; instructions are those of the loop over blocks that are seen fully,
of the same PTX assembled by itself. NOTHING HERE RAN ON A GPU: cycles are instructions and bytes over the rates below.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

KERNELS = ("forward", "queries", "keys")
BATCH, LENGTH, HEADS, GROUPS, ROWS = 4, 4096, 16, 2, 64
CORES, CLOCK = 132, 1.83e9  # 989 TFLOP/s by the data sheet are 4,096 FLOP a cycle at this clock
FLOP_PER_CYCLE = 4096
L2_BYTES_PER_CYCLE = 5.5e12 / CORES / CLOCK  # what a core gets of it, as others measured
# Threads of a core whose instruction of this kind can start in a cycle (CUDA programming guide, 9.0).
RATES = {"exponentials": 16, "integers": 64, "floats": 128, "other": 128}
KINDS = {
    "exponentials": ("MUFU",),
    "integers": ("IMAD", "IADD", "LOP3", "SHF", "ISETP", "LEA", "SEL", "VIADD", "VIMNMX", "IMNMX"),
    "floats": ("FFMA", "FMUL", "FADD", "FMNMX", "FSETP", "FSEL", "F2FP"),
}


def compile_one(kernel: str, size: int, rate: float) -> None:
    """Compile one; JAX prints its PTX and what the assembler says."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from megajax.core.kernels.forward import forward
    from megajax.core.kernels.key_gradient import key_gradients
    from megajax.core.kernels.query_gradient import query_gradient
    from megajax.core.kernels.tiles import Form
    from megajax.plan import h200

    one = NamedSharding(Mesh(np.array(h200.devices(1)), ("x",)), PartitionSpec())
    shape = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, size), jnp.bfloat16, sharding=one)
    rows = [jax.ShapeDtypeStruct((BATCH, 2, LENGTH), jnp.int32, sharding=one)]
    for dtype in [jnp.uint32] * (rate > 0) + [jnp.float32] * (kernel != "forward"):
        rows.append(jax.ShapeDtypeStruct((BATCH, HEADS, 2, LENGTH), dtype, sharding=one))
    function = {"forward": forward, "queries": query_gradient, "keys": key_gradients}[kernel]
    inputs = [shape] * (3 if kernel == "forward" else 4)
    form = Form(jnp.dtype(jnp.bfloat16), rate, 1)
    jax.jit(lambda *x: function(*x[:-1], x[-1], form)).trace(*inputs, rows).lower().compile()


def dumped(kernel: str, size: int, rate: float, folder: Path | None) -> str:
    """What a process prints that compiles it, or printed before."""
    kept = folder / f"{kernel}-{size}-{rate}.txt" if folder else None
    if kept and kept.exists():
        return kept.read_text()
    wanted = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    command = [sys.executable, __file__, "--one", kernel, str(size), str(rate)]
    done = subprocess.run(command, env={**os.environ, **wanted, "JAX_PLATFORMS": "cpu"}, capture_output=True)
    if done.returncode:
        raise RuntimeError(done.stderr.decode()[-2000:])
    text = done.stdout.decode(errors="replace").replace("\0", "")
    if kept:
        kept.write_text(text)
    return text


def tool(name: str) -> str:
    """A program of CUDA's packages."""
    import nvidia

    found = [path for folder in nvidia.__path__ for path in Path(folder).glob(f"*/bin/{name}")]
    return str(found[0]) if found else name


def loops(ptx: str) -> list[list[str]]:
    """Names of the instructions of the loop over blocks that are seen fully, and of that over the others."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "a.ptx"), Path(folder, "a.cubin")
        source.write_text(ptx)
        subprocess.run([tool("ptxas"), "-arch=sm_90a", "-O3", source, "-o", binary], check=True, capture_output=True)
        text = subprocess.run([tool("nvdisasm"), "-c", binary], check=True, capture_output=True, text=True).stdout
    names: list[str] = []
    labels: dict[str, int] = {}
    found: list[list[str]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\d+\s+)?([A-Z0-9]+)([^;]*)", line):
            names.append(code[1])
            target = re.search(r"`\((\.L_x_\d+)\)", code[2])
            start = labels.get(target[1]) if code[1] == "BRA" and target else None
            if start is not None:
                found.append(names[start:])
    # There are two, without and with a mask, of as many products; shorter ones wait for a barrier.
    whole = [body for body in found if 2 * body.count("HGMMA") == names.count("HGMMA")]
    return sorted(whole, key=len)[:2]


def figures(kernel: str, size: int, rate: float, folder: Path | None) -> dict:
    """What is known of one kernel, and its estimated speed where every block is seen fully."""
    text = dumped(kernel, size, rate, folder)
    ptx = text[text.index("//\n// Generated") : text.index("ptxas info")]
    ptx = ptx[: ptx.rindex("}") + 1]
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    registers = re.search(r"Used (\d+) registers", text)
    assert spills and registers
    columns, products, loaded, buffers = _tile(kernel, size, rate)
    inside, masked = [*loops(ptx), [], []][:2]
    count = {kind: sum(name.startswith(prefixes) for name in inside) for kind, prefixes in KINDS.items()}
    count["other"] = len(inside) - sum(count.values()) - inside.count("HGMMA")
    threads = GROUPS * 128
    # The two warpgroups of a core; products run beside all else if the other warpgroup has something to multiply.
    cycles = {kind: number * threads / RATES[kind] for kind, number in count.items()}
    issued = len(inside) * threads / 128
    tensor, bytes_ = products / FLOP_PER_CYCLE, loaded / L2_BYTES_PER_CYCLE
    pipes = max(issued, *cycles.values())
    needed = {"beside": max(tensor, pipes, bytes_), "after": tensor + pipes}
    useful = GROUPS * ROWS * columns * size * (4 if kernel == "forward" else 6 if kernel == "queries" else 8)
    useful /= 2 if kernel == "keys" and size > 128 else 1  # both warpgroups have the same keys
    return {
        "kernel": kernel,
        "size": size,
        "rate": rate,
        "registers": int(registers[1]),
        "spilled": max(map(int, spills.groups())),
        "shared_kib": buffers / 1024,
        "warps": 8 * min(65536 // (threads * int(registers[1])), 232448 // buffers),
        "instructions": len(inside),
        "masked": len(masked),
        **count,
        "tensor_cycles": tensor,
        "load_cycles": bytes_,
        "pipe_cycles": pipes,
        **{f"tflops_{name}": useful / value * CORES * CLOCK / 1e12 for name, value in needed.items()},
    }


def _tile(kernel: str, size: int, rate: float) -> tuple[int, float, float, int]:
    """Of a step of the loop on a core: the columns of a warpgroup's tile, FLOP of products, bytes loaded; and of a
    kernel the bytes of shared memory."""
    from megajax.core.kernels import forward, query_gradient
    from megajax.core.kernels.key_gradient import parts_of

    row = 8 * (1 + (rate > 0) + (kernel != "forward"))  # bytes of what is known of a query
    if kernel == "keys":
        parts = parts_of(size)
        products = GROUPS * ROWS * ROWS * size * 2 * (2 + 2 / parts)
        loaded = 2 * ROWS * size * 2 + row * ROWS
        own = GROUPS * ROWS * size // parts * 2 * 2 + GROUPS * ROWS * ROWS * 2
        return ROWS, products, loaded, own + 2 * loaded
    module = forward if kernel == "forward" else query_gradient
    columns = module.keys_at_once(size)
    loaded = 2 * columns * size * 2
    own = GROUPS * ROWS * (size * 2 * (1 if kernel == "forward" else 2) + row + 4 * (kernel == "forward"))
    return columns, GROUPS * ROWS * columns * size * 2 * (2 if kernel == "forward" else 3), loaded, own + 2 * loaded


def main() -> None:
    """Print a table, and the figures as JSON into a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 96, 128, 256])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for what JAX prints, which is not compiled again")
    parser.add_argument("--one", nargs=3)
    arguments = parser.parse_args()
    if arguments.one:
        kernel, size, rate = arguments.one
        return compile_one(kernel, int(size), float(rate))
    names = ("kernel", "size", "rate", "registers", "spilled", "shared_kib", "warps", "instructions", "masked")
    names += (*RATES, "tensor_cycles", "pipe_cycles", "load_cycles", "tflops_after", "tflops_beside")
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|", flush=True)
    rows = []
    for rate in arguments.rates:
        for size in arguments.sizes:
            for kernel in arguments.kernels:
                rows.append(figures(kernel, size, rate, arguments.keep))
                values = [rows[-1][name] for name in names]
                cells = [f"{x:.0f}" if isinstance(x, float) and x >= 1 else str(x) for x in values]
                print("| " + " | ".join(cells) + " |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
