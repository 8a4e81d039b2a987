"""Attention on one GPU: whether every implementation is right there, and how fast it is.

    python benchmarks/gpu_attention.py --implementation cudnn|kernel|blocks|torch [--device gpu|cpu] [--seconds N]
        [--check] [--first N]

A line of JSON for every case, as soon as it is measured: milliseconds and TFLOP/s of the scores that are seen, forward
and backward, causal, in bf16, of 16,384 tokens of 2,048 features; the results and gradients of ours are held against
our blocks in fp32 (`megajax/start/form_comparison.py`). The exit code is 1 where one of ours is wrong or fails.
`--check` has small cases, for being right alone. torch is PyTorch's scaled_dot_product_attention, the faster of its
flash and cuDNN backends. `--first` leaves out the cases before it.
"""

import dataclasses
import itertools
import json
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import paired

from megajax.core.errors import UserError
from megajax.host.ending import run

RATE = 0.1  # of dropout
NUM_DOCUMENTS = 4  # of a sequence


class Case(NamedTuple):
    """One attention: causal, of `rows` sequences."""

    size: int
    length: int
    rows: int
    heads: int
    kv_heads: int
    dropout: bool = False
    documents: bool = False
    window: int = 0
    padded: bool = False  # not causal then, as BERT's
    dtype: str = "bfloat16"

    def seen(self) -> np.ndarray:
        """Which key every query sees, [T, S]."""
        query_T1, key_S = np.arange(self.length)[:, None], np.arange(self.length)
        first_T1 = query_T1 // (self.length // NUM_DOCUMENTS) * (self.length // NUM_DOCUMENTS)
        seen_TS = (key_S <= query_T1) & (key_S >= first_T1 * self.documents)
        return seen_TS & (query_T1 - key_S < self.window) if self.window else seen_TS

    @property
    def flops(self) -> float:
        """Of the forward pass, of the scores that are seen; the backward pass has 2.5 times as many."""
        return 4.0 * self.size * self.heads * self.rows * int(self.seen().sum())


def speed_cases(device: str) -> list[Case]:
    """All head sizes and lengths, with and without dropout and documents; first those that our presets have."""
    tokens, features, lengths, sizes = 16_384, 2048, (1024, 8192), (64, 96, 128, 192, 256)
    if device == "cpu":
        tokens, features, lengths, sizes = 256, 128, (128,), (64, 128)
    first = [(128, 8192, False, False), (96, 1024, True, False), (128, 8192, False, True), (96, 1024, False, False)]
    first += [(64, 1024, True, False), (256, 8192, False, False), (128, 8192, True, True), (64, 8192, False, False)]
    grid = [*itertools.product(sizes, lengths, (False, True), (False, True))]
    order = [each for each in first if each in grid] + [each for each in grid if each not in first]
    return [
        Case(size, length, tokens // length, max(1, features // size), max(1, features // size), dropout, documents)
        for size, length, dropout, documents in order
    ]


def check_cases(device: str) -> list[Case]:
    """What attention may see, with and without dropout, in small: every pair of features once or more."""
    length, shape = (512, (2, 4, 4)) if device == "gpu" else (64, (2, 2, 2))
    grouped, sizes = (shape[0], shape[1], shape[1] // 2), (64, 96, 128, 192, 256)
    cases = [Case(size, length, *(grouped if size > 64 else shape), dropout=True) for size in sizes]
    cases += [Case(size, length, *shape, documents=True, dropout=size == 128) for size in (64, 128)]
    cases += [Case(128, length - 24, *grouped), Case(64, length, *grouped, window=length // 3 + 1, dropout=True)]
    cases += [Case(64, length, *shape, padded=True, dropout=True), Case(128, length, *shape, padded=True)]
    cases += [Case(128, length, *grouped, documents=True, window=length // 3), Case(96, length, *shape, documents=True)]
    return [*cases, *(Case(128, length, *shape, dropout=dropped, dtype="float16") for dropped in (True, False))]


def ours(implementation: str, device: str, cases: list[Case], first: int, seconds: float, check: bool) -> None:
    """Every case by one of our implementations."""
    from device_time import milliseconds

    end, failed = time.monotonic() + seconds, False
    for number, case in enumerate(cases[first:], first):
        if time.monotonic() > end:
            say(number, case, {"left_out": "no time is left"})
            continue
        say(number, case, {"begun": True})  # who reads this knows then which case ended the process
        compared = comparison(implementation, device, case)
        if not compared.forms:
            say(number, case, {"left_out": f"{implementation} cannot do this"})
            continue
        if problem := compared.problem(implementation):
            say(number, case, {"failed": problem})
            failed = True
            continue
        if check:
            say(number, case, {"right": True})
            continue
        inputs, both = compared.inputs(), compared.function(compared.forms[implementation])
        ahead = milliseconds(lambda *inputs, both=both: both(*inputs)[:1], inputs)
        say(number, case, {"right": True} | figures(case, ahead, milliseconds(both, inputs)))
    sys.exit(failed)


def comparison(implementation: str, device: str, case: Case) -> Any:
    """The case, for `megajax.start.form_comparison`; without forms where the implementation cannot do it."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from megajax.core.backend import BLOCKS, CPU, GPU
    from megajax.core.mesh import make_mesh
    from megajax.core.models.attend import IMPLEMENTATIONS, attend
    from megajax.core.models.attention_mask import AttentionMask
    from megajax.core.models.attention_setting import Setting
    from megajax.core.parallel.random import Dropout
    from megajax.start.form_comparison import FormComparison

    place_T = np.arange(case.length, dtype=np.int32)
    positions_BT = np.tile(place_T % (case.length // NUM_DOCUMENTS), (case.rows, 1))
    there = jax.local_devices()[0]
    base = GPU if device == "gpu" else CPU
    backend = dataclasses.replace(base, attention=tuple(dict.fromkeys((implementation, *BLOCKS))))

    def setting(backend: Any) -> Any:
        visible = AttentionMask(causal=True, window=case.window or None)
        if case.documents:
            visible = visible.in_documents(jnp.asarray(positions_BT))
        if case.padded:
            visible = AttentionMask().padded(jnp.linspace(case.length // 3, case.length, case.rows).astype(jnp.int32))
        rows_B = jnp.arange(case.rows, dtype=jnp.int32)
        return Setting(visible, Dropout.at(RATE * case.dropout, 0, jnp.zeros((), jnp.int32), rows_B), backend)

    def function(backend: Any) -> Any:
        heads = P(None, None, "tensor")

        def both(q: Any, k: Any, v: Any, grad: Any) -> Any:
            given = setting(backend)
            y, pull = jax.vjp(lambda *qkv: attend(*qkv, given), q, k, v)
            return y, *pull(grad)

        return jax.shard_map(both, mesh=make_mesh([there]), in_specs=(heads,) * 4, out_specs=heads)

    def inputs() -> list[Any]:
        heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = [(case.rows, case.length, each, case.size) for each in heads]
        drawn = [jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, shapes, strict=True)]
        return jax.device_put([x.astype(case.dtype) for x in drawn], there)

    q_BTHK = jax.ShapeDtypeStruct((case.rows, case.length, case.heads, case.size), jnp.dtype(case.dtype))
    able: list[bool] = []
    jax.eval_shape(lambda: able.append(IMPLEMENTATIONS[implementation].can(q_BTHK, setting(backend))) or jnp.zeros(()))
    forms = {implementation: backend} if able[0] else {}
    outputs = ["the heads", *(f"the gradient of the {name}" for name in ("queries", "keys", "values"))]
    reference = dataclasses.replace(base, attention=BLOCKS, query_block=2048, scores_bytes=2**28)
    return FormComparison("attention", str(case), outputs, forms, reference, function, inputs)


def torchs(device: str, cases: list[Case], first: int, seconds: float) -> None:
    """Every case by PyTorch; documents by a mask, which its flash and cuDNN backends do not take."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    there, end = "cuda" if device == "gpu" else "cpu", time.monotonic() + seconds
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION] if device == "gpu" else [SDPBackend.MATH]
    for number, case in enumerate(cases[first:], first):
        if time.monotonic() > end:
            say(number, case, {"left_out": "no time is left"})
            continue
        shapes = [(case.rows, heads, case.length, case.size) for heads in (case.heads, case.kv_heads, case.kv_heads)]
        qkv = [torch.randn(s, device=there, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
        given: dict[str, Any] = {"dropout_p": RATE * case.dropout, "is_causal": not case.documents}
        if case.documents:
            given["attn_mask"] = torch.from_numpy(case.seen()).to(there)
        found: dict[str, dict] = {}
        for backend in [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH] if case.documents else backends:
            try:
                with sdpa_kernel(backend):
                    attended = scaled_dot_product_attention(*qkv, **given)
                    grad = torch.randn_like(attended)

                    def forward(given: dict = given, qkv: list = qkv) -> None:
                        scaled_dot_product_attention(*qkv, **given)

                    def both(given: dict = given, qkv: list = qkv, grad: Any = grad) -> None:
                        torch.autograd.grad(scaled_dot_product_attention(*qkv, **given), qkv, grad)

                    times = [torch_milliseconds(torch, each, device) for each in (forward, both)]
                found[backend.name.lower()] = figures(case, *times)
            except RuntimeError as error:  # the backend has no such attention
                found[backend.name.lower()] = {"failed": str(error).strip().partition("\n")[0][:160]}
        measured = {name: each for name, each in found.items() if "failed" not in each}
        if not measured:
            say(number, case, {"failed": "; ".join(f"{name}: {each['failed']}" for name, each in found.items())})
            continue
        best = min(measured, key=lambda name: measured[name]["both_ms"])
        say(number, case, measured[best] | {"backend": best})


def torch_milliseconds(torch: Any, call: Any, device: str, rounds: int = 5, calls: int = 4) -> float:
    """The median time of a call."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        if device == "gpu":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began) / calls)
    return float(np.median(times[1:]))


def figures(case: Case, forward_ms: float, both_ms: float) -> dict:
    """Times and rates of a case; the backward pass is what is left of both."""
    backward_ms = max(both_ms - forward_ms, 1e-6)
    rates = {"forward_tflops": case.flops / forward_ms / 1e9, "backward_tflops": 2.5 * case.flops / backward_ms / 1e9}
    return {"forward_ms": forward_ms, "both_ms": both_ms} | rates


def say(number: int, case: Case, found: dict) -> None:
    """A line of JSON."""
    print(json.dumps({"number": number} | case._asdict() | found), flush=True)


def main() -> None:
    """Parse the command line and run."""
    kinds = (None, "cudnn", "kernel", "blocks", "torch")
    own, flags, usage = paired.own_flags(
        implementation=kinds, device=("gpu", "cpu"), seconds=60.0, first=0, check=False
    )
    if not own.implementation:
        raise UserError(f"--implementation is missing; valid: {usage}")
    if flags:
        raise UserError(f"{flags[0]}: unknown; valid: {usage}")
    cases = (check_cases if own.check else speed_cases)(own.device)
    if own.implementation == "torch":
        torchs(own.device, cases, own.first, own.seconds)
    else:
        ours(own.implementation, own.device, cases, own.first, own.seconds, own.check)


if __name__ == "__main__":
    run(main)
