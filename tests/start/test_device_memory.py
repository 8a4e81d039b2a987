"""What a run certainly needs of its devices' memory, and what they have."""

import math
from types import SimpleNamespace

import pytest
from tiny import tiny_config, tiny_program

from megajax.core.errors import UserError
from megajax.core.program.memory import kept_bytes
from megajax.start import device_memory


@pytest.mark.parametrize(("mesh", "zero"), [((1, 1, 1), 1), ((2, 2, 1), 0), ((2, 1, 2), 3)])
def test_what_does_not_fit_is_refused_to_the_byte(mesh, zero, monkeypatch) -> None:
    """The devices of a CPU share its memory; a GPU has its own, and where it does not say how much, all fits."""
    program = tiny_program(tiny_config(mesh, precision="bf16", zero=zero))
    weights, main, moments = kept_bytes(program.layout).values()
    devices = math.prod(mesh)
    activations = 3 * 16 * 24 * 2 * 4 // mesh[1]  # rows, tokens, width, bytes, layers
    scores, logits = 16 * 16 * 4, 3 * 16 * 128 * 2 // mesh[2]
    for needed, options in (
        (weights + main + moments + activations + scores + logits, {"training": True, "rows": 3}),
        (weights, {"training": False}),
    ):
        monkeypatch.setattr(device_memory, "_machine_bytes", lambda needed=needed: needed * devices)
        device_memory.check_memory(program, **options)
        monkeypatch.setattr(device_memory, "_machine_bytes", lambda needed=needed: needed * devices - 1)
        message = rf"--model\.num-layers 4, .* need .* on each of {devices} devices .*; valid: "
        with pytest.raises(UserError, match=message):
            device_memory.check_memory(program, **options)


def test_the_memory_of_devices(monkeypatch) -> None:
    def gpus(*limits):
        stats = [None if limit is None else {"bytes_limit": limit} for limit in limits]
        return [SimpleNamespace(platform="gpu", memory_stats=lambda each=each: each) for each in stats]

    assert device_memory._device_bytes(gpus(5, 3, None)) == 3 and device_memory._device_bytes(gpus(None)) == math.inf
    monkeypatch.setattr(device_memory, "_machine_bytes", lambda: 8)
    assert device_memory._device_bytes([SimpleNamespace(platform="cpu")] * 4) == 2
    monkeypatch.undo()
    assert 2**28 < device_memory._machine_bytes() < 2**50
