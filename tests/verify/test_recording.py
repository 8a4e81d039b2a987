"""Which place is named, of recordings that are made up; and the sites of a real step."""

import numpy as np
from tiny import tiny_config

from megajax.parallel.sites import SiteRecord
from megajax.verify.comparison import trace
from megajax.verify.recording import Place, Recording, first_difference

LAYERS, SAMPLES, TOKENS, WIDTH = 2, 4, 3, 8


def value(layer: int, site: str, backward: bool, sample: int) -> np.ndarray:
    seed = [layer, len(site), backward, sample]
    return np.random.default_rng(seed).normal(size=(TOKENS, WIDTH))


def recorded(devices: int = 1, change=lambda place, sample, device, value: value) -> Recording:
    """Of a forward and backward pass, in any order; the last dim of what the MLP has inside is shared by devices."""
    recording = Recording()
    for backward in (True, False):
        for layer in reversed(range(LAYERS)):
            for site in ("output", "input", "mlp_up"):
                split = 2 if site == "mlp_up" else None
                for sample, device in np.ndindex(SAMPLES, devices):
                    whole, size = value(layer, site, backward, sample), WIDTH // devices
                    first = device * size if split else 0
                    own = whole[:, first : first + size] if split else whole
                    own = change(Place(layer, site, backward), sample, device, own)
                    if own is not None:
                        turn = ("input", "mlp_up", "output").index(site)
                        at = np.array([sample]), own[None], split, first, False, (0, 0, device), turn
                        recording.take(SiteRecord(site, backward, layer, *at))
    return recording


def found(change) -> tuple:
    difference = first_difference(recorded(), recorded(2, change), 1e-9)
    assert difference is not None
    return difference.place, difference.samples


def test_the_same_on_other_devices() -> None:
    assert first_difference(recorded(), recorded(2), 1e-12) is None


def test_the_first_in_the_order_of_computation() -> None:
    """Forward before backward, and backward from the last layer on."""
    for changes, first in (
        (lambda place: place.layer == 1, (1, "input", False)),
        (lambda place: place.site == "mlp_up", (0, "mlp_up", False)),
        (lambda place: place.backward, (1, "output", True)),
    ):
        assert found(lambda place, _, device, x, of=changes: x * 2 if of(place) else x)[0] == first


def test_a_layer_that_is_never_computed_comes_first() -> None:
    """Another one runs in its place, under its own number, which is not at fault."""

    def other(place, sample, device, x):
        return None if place.layer == 1 else x + device

    assert found(other) == (Place(1, "input", False), [0, 1, 2, 3])


def test_padded_columns_do_not_hide_the_others() -> None:
    """Their logits are the lowest number there is."""
    lowest = np.finfo(np.float64).min

    def logits(change: float, masked: int) -> Recording:
        recording, value = Recording(), np.ones((1, TOKENS, WIDTH))
        value[..., 0] += change
        value[..., masked:] = lowest
        recording.take(SiteRecord("logits", False, -1, np.array([0]), value, None, 0, False, (0, 0, 0)))
        return recording

    assert first_difference(logits(0, 6), logits(0, 6), 1e-9) is None
    assert "different numbers" in str(first_difference(logits(0, 6), logits(1e-3, 6), 1e-9))
    assert "other columns" in str(first_difference(logits(0, 6), logits(0, 7), 1e-9))


def test_which_rows() -> None:
    def one(place, sample, device, x):
        return x + 1e-6 if (place.site, sample, device) == ("mlp_up", 2, 1) else x

    assert found(one) == (Place(0, "mlp_up", False), [2])


def test_what_is_said_of_it() -> None:
    def said(change) -> str:
        return str(first_difference(recorded(), recorded(2, change), 1e-9))

    assert "2 times what it should be" in said(lambda place, sample, device, x: 2 * x)
    assert "rows never computed: [3]" in said(lambda place, sample, device, x: None if sample == 3 else x)
    apart = said(lambda place, sample, device, x: x + device if place.site == "output" else x)
    assert "different numbers of the same" in apart and "output of layer 0, forward" in apart
    assert "error inf" in said(lambda place, sample, device, x: x * np.nan)


def test_gradients_of_what_devices_share_add_up() -> None:
    """Each has a part of the gradient of the same head; told twice by a device it counts once."""
    whole = np.random.default_rng(0).normal(size=(1, TOKENS, 1, WIDTH))
    alone, shared = Recording(), Recording()
    for recording, devices in ((alone, [0]), (shared, [0, 1, 1])):
        for device in devices:
            part = whole if recording is alone else whole * (0.25, 0.75)[device]
            at = np.array([0]), part, 2, 0, recording is shared, (0, 0, device)
            recording.take(SiteRecord("key", True, 0, *at))
    assert first_difference(alone, shared, 1e-12) is None


LAYER = {
    *("input", "attention_norm", "query", "key", "value", "attention_heads", "attention_output", "attention_dropout"),
    *("attention_residual", "mlp_norm", "mlp_up", "mlp_activation", "mlp_output", "mlp_dropout", "output"),
}
HEAD = {"last_output", "final_norm", "logits", "losses"}


def step_recorded(mesh: tuple[int, int, int], **options) -> Recording:
    recording = Recording()
    with recording.taken():
        trace(tiny_config(mesh, num_layers=1, global_batch=2, dropout=0.1, **options), 1, quick_compile=True)
    return recording


def test_every_site_of_a_step_on_two_meshes() -> None:
    """All are told, of every row, and a mesh changes none."""
    alone, split = step_recorded((1, 1, 1)), step_recorded((1, 1, 2), sequence_parallel=True, remat="layer")
    expected = {(0, site, back) for site in LAYER for back in (False, True)}
    expected |= {(-1, site, back) for site in HEAD for back in (False, True)}
    for recording in (alone, split):
        assert {*recording.places} == expected
        assert all(recording.samples(place) == [0, 1] for place in recording.places)
    assert first_difference(alone, split, 1e-4) is None
