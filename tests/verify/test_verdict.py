"""Every check can fail, and says where; which place is named: of what is made up."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from tiny import tiny_config

from jaxequal.numbers import PRIMES
from megajax.core.parallel.sites import SiteRecord
from megajax.settings.config import Config
from megajax.verify.check import all_checks, widened
from megajax.verify.comparison import CompiledComparison, Trace, compare
from megajax.verify.fields import recorded_step, unlike
from megajax.verify.forms import in_fp64, one_device, with_axes
from megajax.verify.recording import Recording, SitePlace, first_difference
from megajax.verify.run import MeshRun
from megajax.verify.verdict import Finding, Verdict, same_on_mesh

MESH, STEPS, LAYERS = (2, 2, 2), 3, 4
SHAPES = {"shared/embedding/tokens": (128, 24), "blocks/mlp/up/weight": (LAYERS, 24, 96), "blocks/norm/bias": (4, 24)}


def made_up(config: Config, steps: int = STEPS) -> MeshRun:
    """A run of no error."""
    rng = np.random.default_rng(0)
    draw = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    metrics = [{"loss": 4.0 - step / 8, "grad_norm": 2.0, "skipped": 0.0} for step in range(steps)]
    for number, figures in enumerate(metrics):
        figures["loss_scale"] = (65536.0 if number < 2 else 131072.0) if config.precision == "fp16" else 1.0
    data, rows = config.mesh.data, config.train.global_batch // config.mesh.data
    return MeshRun(
        config=config,
        metrics=metrics,
        loads={},
        gradients=draw,
        weights=draw,
        uncast=[],
        overflow={"loss": 3.0, "grad_norm": math.nan, "skipped": 1.0},
        moved=[],
        unequal=[],
        rows=[list(range(place * rows, (place + 1) * rows)) for place in range(data)],
        sums=[],
    )


def config_of(precision: str) -> Config:
    config = tiny_config(MESH, precision=precision)
    return dataclasses.replace(config, loss_scale=dataclasses.replace(config.loss_scale, growth_every=2))


def verdict(precision: str, change: Callable[[MeshRun], MeshRun] = lambda run: run) -> Verdict:
    config = config_of(precision)
    reference, other = made_up(one_device(config)), change(made_up(config))
    return Verdict((*same_on_mesh(reference, other), *all_checks(reference, other)))


def only_failure(precision: str, change: Callable[[MeshRun], MeshRun]) -> Finding:
    (failed,) = verdict(precision, change).failed
    return failed


@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16", "bf16"])
def test_what_does_not_differ_passes(precision: str) -> None:
    found = verdict(precision)
    assert found.passed and not found.failed and len(found.findings) >= 8


def with_gradient(leaf: str, of: Callable[[np.ndarray], np.ndarray]) -> Callable[[MeshRun], MeshRun]:
    def change(run: MeshRun) -> MeshRun:
        return dataclasses.replace(run, gradients=run.gradients | {leaf: of(run.gradients[leaf].copy())})

    return change


def test_a_gradient_is_named_with_its_layers() -> None:
    def twice(grad: np.ndarray) -> np.ndarray:
        grad[[1, 3]] *= 2
        return grad

    found = only_failure("fp64", with_gradient("blocks/mlp/up/weight", twice))
    assert found.name == "fp64 gradients" and found.layers == (1, 3)
    assert "blocks/mlp/up/weight, layer 1, 3 (1 of 3 leaves" in found.where
    found = only_failure("bf16", with_gradient("shared/embedding/tokens", lambda grad: 1.1 * grad))
    assert found.layers == () and "shared/embedding/tokens (1 of 3" in found.where


@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16", "bf16"])
def test_nothing_is_infinitely_wrong_unnoticed(precision: str) -> None:
    found = only_failure(precision, with_gradient("blocks/norm/bias", lambda grad: grad * math.nan))
    assert found.figure == math.inf


def test_every_difference_of_traces_is_noticed() -> None:
    """Another step's numbers, a doubled gradient and a NaN."""
    rng = np.random.default_rng(0)
    gradients = [{name: rng.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(3)]
    expected = Trace([4.0, 3.5, 3.0], gradients)
    assert compare(expected, expected) == CompiledComparison(0.0, 0.0, next(iter(gradients[0])))
    assert not compare(expected, Trace(expected.losses[::-1], gradients[::-1])).within()
    for leaf in SHAPES:
        wrong = compare(expected, Trace(expected.losses, [each | {leaf: 1.001 * each[leaf]} for each in gradients]))
        assert wrong.worst_leaf == leaf and not wrong.within()
    missing = [{name: math.nan * gradient for name, gradient in each.items()} for each in gradients]
    assert not compare(expected, Trace(expected.losses, missing)).within()
    assert not compare(expected, Trace([math.nan, 3.5, 3.0], gradients)).within()


def test_limits_are_those_of_rounding() -> None:
    """What is just above a limit fails, what is below passes."""
    for precision, limit in (("fp64", 1e-12), ("fp32", 1e-5), ("fp16", 5e-3), ("bf16", 4e-2)):
        for factor, passes in ((0.9, True), (1.1, False)):
            change = with_gradient("blocks/mlp/up/weight", lambda grad, by=factor * limit: grad * (1 + by))
            assert verdict(precision, change).passed == passes, (precision, factor)


@pytest.mark.parametrize(("error", "limit"), [(1e-3, 4e-2), (3e-2, 6e-2), (5e-2, 10e-2), (0.1, 0.2), (math.nan, 0.4)])
def test_rounding_of_one_device_widens_limits_of_half_precision(error: float, limit: float) -> None:
    config = config_of("bf16")
    alone = with_gradient("blocks/mlp/up/weight", lambda grad: grad * (1 + error))(made_up(config))
    found = widened(made_up(one_device(config)), alone)
    assert found.gradient == pytest.approx(limit) and (found.loss, found.weight) == (2e-4, 4e-2)


def metric(name: str, value: float, step: int = 1) -> Callable[[MeshRun], MeshRun]:
    def change(run: MeshRun) -> MeshRun:
        metrics = [dict(figures) for figures in run.metrics]
        metrics[step][name] = value
        return dataclasses.replace(run, metrics=metrics)

    return change


def replaced(**fields: object) -> Callable[[MeshRun], MeshRun]:
    return lambda run: dataclasses.replace(run, **fields)  # type: ignore[arg-type]


def with_weight(by: float) -> Callable[[MeshRun], MeshRun]:
    """A weight is wrong by this share."""
    leaf = "blocks/norm/bias"
    return lambda run: dataclasses.replace(run, weights=run.weights | {leaf: (1 + by) * run.weights[leaf]})


OTHERS = {
    "fp64 losses": ("fp64", metric("loss", 3.8, 0)),
    "bf16 losses": ("bf16", metric("loss", math.nan, 0)),
    "fp64 weights after one step": ("fp64", with_weight(1e-11)),
    "fp64 skipped steps": ("fp64", replaced(overflow={"skipped": 0.0})),
    "bf16 state after the skipped step, bit for bit": ("bf16", replaced(moved=["optimizer/0/momentum"])),
    "bf16 dtype of sums of gradients": ("bf16", replaced(sums=["blocks/norm/bias"])),
    "bf16 skipped steps": ("bf16", metric("skipped", 1.0)),
    "batch rows in the order of one device": ("fp64", replaced(rows=[[4, 5, 6, 7], [0, 1, 2, 3]])),
    "fp32 replicas of the state, bit for bit": ("fp32", replaced(unequal=["step"])),
    "bf16 weights equal the main weights, cast": ("bf16", replaced(uncast=["shared/embedding/tokens"])),
    "fp16 loss scale": ("fp16", metric("loss_scale", 65536.0, 2)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_check_can_fail(name: str) -> None:
    precision, change = OTHERS[name]
    assert [finding.name for finding in verdict(precision, change).failed] == [name]


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3], [0, 1, 2, 3]], [[0, 1, 2, 3], []], [[0, 1, 2, 3], [4, 5, 6]]])
def test_rows_that_are_there_twice_or_not_at_all(rows: list[list[int]]) -> None:
    failed = [finding.name for finding in verdict("fp64", replaced(rows=rows)).failed]
    assert "batch rows per data rank" in failed


def test_meshes_with_axes_left_out() -> None:
    """As many microbatches, and what needs a pipe or a tensor group goes with it."""
    options = {"schedule": "interleaved", "chunks": 2, "vocabulary": "split", "sequence_parallel": True}
    config = tiny_config(MESH, microbatch=2, global_batch=24, **options)
    alone = with_axes(config, ("data",))
    assert (alone.mesh.data, alone.mesh.pipe, alone.mesh.tensor) == (2, 1, 1)
    assert alone.pipeline.schedule == "1f1b" and not alone.sequence_parallel and alone.train.microbatch == 2
    assert with_axes(config, ()).train.microbatch == 4  # 24 rows in 6 microbatches
    assert with_axes(config, ("pipe", "tensor")).pipeline == config.pipeline
    assert with_axes(config, ("data", "pipe", "tensor")) == config
    assert in_fp64(config).precision == "fp64"


DEPTH, SAMPLES, TOKENS, WIDTH = 2, 4, 3, 8


def value(layer: int, site: str, backward: bool, sample: int) -> np.ndarray:
    """Elements of the first field."""
    seed = [layer, len(site), backward, sample]
    return np.random.default_rng(seed).integers(1, PRIMES[0], (TOKENS, WIDTH)).astype(np.float64)


def recorded(devices: int = 1, change=lambda place, sample, device, value: value) -> Recording:
    """Of a forward and backward pass, in any order; the last dim of what the MLP has inside is shared by devices."""
    recording = Recording()
    for backward in (True, False):
        for layer in reversed(range(DEPTH)):
            for site in ("output", "input", "mlp_up"):
                split = 2 if site == "mlp_up" else None
                for sample, device in np.ndindex(SAMPLES, devices):
                    whole, size = value(layer, site, backward, sample), WIDTH // devices
                    first = device * size if split else 0
                    own = whole[:, first : first + size] if split else whole
                    own = change(SitePlace(layer, site, backward), sample, device, own)
                    if own is not None:
                        turn = ("input", "mlp_up", "output").index(site)
                        at = np.array([sample]), own[None], split, first, (), (0, 0, 0, 0, device), None, turn
                        recording.take(SiteRecord(site, backward, layer, *at))
    return recording


def found(change) -> tuple:
    difference = first_difference(recorded(), recorded(2, change), unlike)
    assert difference is not None
    return difference.place, difference.samples


def test_the_same_on_other_devices() -> None:
    assert first_difference(recorded(), recorded(2), unlike) is None


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

    assert found(other) == (SitePlace(1, "input", False), [0, 1, 2, 3])


def test_padded_columns_do_not_hide_the_others() -> None:
    """Their logits are negative."""

    def logits(change: float, masked: int) -> Recording:
        recording, value = Recording(), np.ones((1, TOKENS, WIDTH))
        value[..., 0] += change
        value[..., masked:] = -1
        recording.take(SiteRecord("logits", False, -1, np.array([0]), value, None, 0, (), (0, 0, 0, 0)))
        return recording

    assert first_difference(logits(0, 6), logits(0, 6), unlike) is None
    assert "different numbers" in str(first_difference(logits(0, 6), logits(1, 6), unlike))
    assert "different columns" in str(first_difference(logits(0, 6), logits(0, 7), unlike))


def test_which_rows() -> None:
    def one(place, sample, device, x):
        return x + 1 if (place.site, sample, device) == ("mlp_up", 2, 1) else x

    assert found(one) == (SitePlace(0, "mlp_up", False), [2])


def test_what_is_said_of_it() -> None:
    def said(change) -> str:
        return str(first_difference(recorded(), recorded(2, change), unlike))

    assert "2 times what it should be" in said(lambda place, sample, device, x: 2 * x)
    assert "rows never computed: [3]" in said(lambda place, sample, device, x: None if sample == 3 else x)
    apart = said(lambda place, sample, device, x: x + device if place.site == "output" else x)
    assert "disagree" in apart and "output of layer 0, forward" in apart


def test_gradients_of_what_devices_share_add_up() -> None:
    """Each has a part of the gradient of the same head; told twice by a device it counts once."""
    whole = np.random.default_rng(0).integers(1, 99, (1, TOKENS, 1, WIDTH)) * 4.0
    alone, shared = Recording(), Recording()
    for recording, devices in ((alone, [0]), (shared, [0, 1, 1])):
        for device in devices:
            part = whole if recording is alone else whole * (0.25, 0.75)[device]
            at = np.array([0]), part, 2, 0, ("tensor",) if recording is shared else (), (0, 0, 0, 0, device)
            recording.take(SiteRecord("key", True, 0, *at))
    assert first_difference(alone, shared, unlike) is None


@pytest.mark.parametrize("backward", [False, True])
def test_values_of_rows_where_tokens_are_shared(backward: bool) -> None:
    """Devices have terms of their sum; as its gradient each has all of it."""
    whole, tokens = np.array([3.0]), (np.array([0, 3]), np.array([1, 2]))
    alone, shared = Recording(), Recording()
    for recording, shards in ((alone, [None]), (shared, tokens)):
        for number, own in enumerate(shards):
            x = whole if backward or number == 0 else 0 * whole
            at = np.array([0]), x, None, 0, (), (0, 0, 0, number, 0), own
            recording.take(SiteRecord("losses", backward, -1, *at))
    assert first_difference(alone, shared, unlike) is None


LAYER = {
    *("input", "attention_norm", "query", "key", "value", "attention_heads", "attention_output", "attention_dropout"),
    *("attention_residual", "mlp_norm", "mlp_up", "mlp_activation", "mlp_output", "mlp_dropout", "output"),
}
HEAD = {"last_output", "final_norm", "logits", "losses"}


@pytest.mark.full
def test_every_site_of_a_step_on_two_meshes() -> None:
    """All are told, of every row, and a mesh changes none."""
    options = {"num_layers": 1, "global_batch": 2, "dropout": 0.1}
    alone = recorded_step(tiny_config((1, 1, 1), **options))
    split = recorded_step(tiny_config((1, 1, 2), sequence_parallel=True, remat="layer", **options))
    expected = {(0, site, back) for site in LAYER for back in (False, True)}
    expected |= {(-1, site, back) for site in HEAD for back in (False, True)}
    for recording in (alone, split):
        assert {*recording.places} == expected
        assert all(recording.samples(place) == [0, 1] for place in recording.places)
    assert first_difference(alone, split, unlike) is None
