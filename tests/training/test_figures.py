"""TFLOP/s and MFU of a step, against counts by hand; peaks of GPUs; memory; when training ends, and the decay of the
learning rate that no preset gives."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from tiny import tiny_config, tiny_program

from megajax.core.backend import CPU
from megajax.core.optim.config import Horizon
from megajax.core.program.memory import state_bytes
from megajax.plan.machines import MACHINES, peak_of_device
from megajax.plan.memory import memory
from megajax.runs.directory import stored_optimizer
from megajax.runs.order import read_order
from megajax.settings.config import Config, profiled_steps, to_toml
from megajax.settings.preset_files import preset_names
from megajax.settings.presets import load_preset, resolve
from megajax.training.begin import _keep_config, with_total_steps
from megajax.training.describe import _step_memory, changed_rate, precision_line, rate_warning
from megajax.training.figures import Speed, in_words, memory_figures, memory_in_use


@pytest.mark.parametrize(
    ("kind", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 67e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
        ("NVIDIA A100 80GB PCIe", "bf16", 312e12),
        ("A100-SXM4-40GB", "bf16", 312e12),  # drivers of before 2021
        ("NVIDIA B200", "bf16", 2250e12),
        ("Tesla V100-SXM2-32GB", "bf16", None),  # which has none
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("Tesla V100-SXM3-32GB-H", "fp16", MACHINES["v100"].peak["fp16"]),  # the paper's
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),  # a part of one
        ("NVIDIA GeForce RTX 4090", "bf16", None),
        ("cpu", "bf16", None),
    ],
)
def test_peaks_by_device(kind: str, precision: str, peak: float | None) -> None:
    assert peak_of_device(kind, precision) == peak


@pytest.mark.parametrize(
    ("name", "value", "percent", "text"),
    [
        ("accuracy", 1.0, False, "accuracy 100.00%"),
        ("sentence_order_accuracy", 0.87349, False, "sentence_order_accuracy 87.35%"),
        ("accuracy_matched", 87.349, True, "accuracy_matched 87.35%"),
        ("f1", 93.1234, True, "f1 93.12"),
        ("loss", 0.17494, True, "loss 0.1749"),
        ("records", 9812, True, "records 9,812"),
    ],
)
def test_measures_in_words(name: str, value: float, percent: bool, text: str) -> None:
    """An accuracy looks the same wherever it stands, whether it is known as a share or in percent."""
    assert in_words(name, value, percent=percent) == text


def test_mfu_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's count, 72 B s L h² (1 + s / 6h + V / 12Lh), over eight H100s and the seconds of a step."""
    assert set(Speed(tiny_config((1, 1, 1))).figures(1, 1.0)) == {"tflops_per_device"}, "a device of unknown peak"
    config = tiny_config((2, 2, 2), precision="bf16")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")])
    model = config.model
    s, L, h, V = model.sequence_length, model.num_layers, model.hidden_size, model.padded_vocab_size
    rows, seconds = 6, 0.25
    flops = 72 * rows * s * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))
    found = Speed(config).figures(rows, seconds)
    assert found == pytest.approx(
        {"tflops_per_device": flops / 8 / seconds / 1e12, "mfu": flops / 8 / seconds / 989e12}, rel=1e-12
    )


def devices(*stats: dict[str, int] | None) -> list:
    return [SimpleNamespace(memory_stats=lambda each=each: each) for each in stats]


def test_memory_of_the_fullest_device() -> None:
    found = memory_figures(devices({"bytes_in_use": 3, "peak_bytes_in_use": 9}, {"bytes_in_use": 5}, None))
    assert found == {"memory_bytes": 5, "peak_memory_bytes": 9}
    assert memory_figures(devices(None)) == {}
    used = {"peak_bytes_in_use": 3 * 2**20, "bytes_limit": 2**30}
    more = {"peak_bytes_in_use": 5 * 2**20, "bytes_limit": 2**29}
    told = "memory: 5.0 MiB{} peak use on this process's devices"
    assert memory_in_use(devices(used, None, more)) == told.format(" of 512.0")
    assert memory_in_use(devices({"peak_bytes_in_use": 5 * 2**20})) == told.format("")
    assert memory_in_use(devices(None)) is None


def test_the_plan_of_a_run() -> None:
    """All of what `state_bytes` has, and what the step needs beside it."""
    config = tiny_config((2, 2, 2), weight_gradients="deferred")
    program, plan = tiny_program(config), memory(config, CPU)
    told = _step_memory(config, program)
    assert plan.total > sum(state_bytes(program).values())
    assert told.startswith(f"memory: {plan.total / 2**20:,.1f} MiB per device planned")
    assert f"factors {plan.factors / 2**20:,.1f}" in told and plan.factors > 0


@pytest.mark.parametrize(
    ("text", "finished", "steps", "expected"),
    [
        ("10:13", 0, 100, (10, 13)),
        ("3", 0, 100, (3, 5)),  # not the first ones, which warm up
        ("3", 50, 100, (53, 55)),
        ("3", 0, 4, (2, 4)),
        ("3", 0, 2, (1, 2)),
    ],
)
def test_which_steps(text: str, finished: int, steps: int, expected: tuple[int, int]) -> None:
    assert profiled_steps(text, finished, steps) == expected


RATES = {"train.steps": 100, "optimizer.learning_rate": 1.5e-3, "optimizer.warmup_steps": 40}
DEMO = {key: value for key, value in load_preset("demo").items() if key != "optimizer.decay_steps"} | RATES
EPOCH = SimpleNamespace(epoch_size=80)


def begun(values: dict[str, Any], began_with: int = 100) -> Config:
    """A run of the demo that has begun with so many steps, with other values."""
    return with_total_steps(resolve(DEMO, values, decay_follows=False), EPOCH, Horizon(decay_steps=began_with))


@pytest.mark.parametrize(
    ("values", "began_with", "decay_steps"),
    [
        ({}, 0, 100),
        ({"train.steps": 70}, 0, 70),
        ({"train.steps": 7}, 0, 40),  # the warm-up's
        ({"train.steps": 300}, 100, 100),
        ({"train.steps": 300, "optimizer.decay_steps": 200}, 100, 200),
        ({"optimizer.schedule": "linear", "train.steps": 60}, 0, 60),
        ({"optimizer.schedule": "constant", "train.steps": 60}, 0, 0),  # another one can follow
    ],
)
def test_the_decay_ends_with_the_training_that_the_run_began_with(
    values: dict[str, Any], began_with: int, decay_steps: int
) -> None:
    config = begun(values, began_with)
    assert config.optimizer.decay_steps == decay_steps and config.train.steps == values.get("train.steps", 100)
    if not began_with:
        assert resolve(DEMO, values).optimizer.decay_steps == decay_steps, "as where nothing goes on"


EIGHT = DEMO | {"train.steps": 8, "optimizer.warmup_steps": 0, "optimizer.warmup_fraction": 0.25}
WSD = {"optimizer.schedule": "wsd", "optimizer.cooldown_steps": 3}


@pytest.mark.parametrize(
    ("before", "now", "horizon"),
    [
        ("constant", {"optimizer.schedule": "linear"}, (2, 20)),
        ("inverse-square-root", WSD, (2, 20)),
        ("constant", {"optimizer.schedule": "cosine", "optimizer.decay_steps": 15}, (2, 15)),
        ("constant", {"optimizer.schedule": "linear", "optimizer.warmup_fraction": 0.5}, (10, 20)),
        ("constant", {"optimizer.schedule": "linear", "optimizer.warmup_steps": 3}, (3, 20)),
        ("linear", {"optimizer.schedule": "linear"}, (2, 8)),
        ("linear", {"optimizer.schedule": "cosine"}, (2, 20)),
    ],
)
def test_a_resumed_run_keeps_its_own_horizon_while_its_schedule_stays(
    before: str, now: dict[str, Any], horizon: tuple[int, int], tmp_path: Path
) -> None:
    """Resumed by the preset that it began with or by its own configuration; a copy of it keeps nothing."""
    first = resolve(EIGHT, {"optimizer.schedule": before}, decay_follows=False)
    folder = tmp_path / "run"
    (folder / "checkpoints" / "8").mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(first, with_total_steps(first, EPOCH).optimizer.horizon))
    for preset in (EIGHT, load_preset(folder / "config.toml")):
        config = resolve(preset, {**now, "train.steps": 20}, decay_follows=False)
        kept = config.optimizer.kept_of(stored_optimizer(folder, config))
        assert with_total_steps(config, EPOCH, kept).optimizer.horizon == horizon
        assert with_total_steps(config, EPOCH).optimizer.horizon.decay_steps == now.get("optimizer.decay_steps", 20)


def test_a_resumed_run_rewrites_its_configuration_only_if_it_changed(tmp_path: Path) -> None:
    """So that comments stay. Each start keeps its own, unless nothing changed."""
    file = tmp_path / "config.toml"

    def keep(steps: int) -> str:
        config = resolve(DEMO, {"run_dir": str(tmp_path), "train.steps": steps}, decay_follows=False)
        log, order = SimpleNamespace(record_config=lambda config: None), read_order(config, tmp_path)
        checkpoints = SimpleNamespace(saved=8)
        start = {"checkpoints": checkpoints, "log": log, "order": order, "first": steps - 1, "data": None}
        run = SimpleNamespace(config=with_total_steps(config, EPOCH), **start)
        _keep_config(config, run)  # type: ignore[arg-type]
        return file.read_text()

    file.write_text("run_config = true\n")
    first = keep(8)
    file.write_text(f"# my notes\n{first}")
    assert keep(8) == f"# my notes\n{first}" and keep(9) != first and "steps = 9\n" in file.read_text()
    assert {each.name for each in (tmp_path / "starts").iterdir()} == {"0.toml", "7.toml", "8.toml"}
    assert "steps = 8\n" in (tmp_path / "starts" / "7.toml").read_text()


PUBLISHED = [name for name in preset_names() if not name.endswith("demo")]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_follows_its_steps(name: str) -> None:
    """Warm-up and decay are the recipe's in as many steps as it has, and their shares of any other number."""
    preset = load_preset(name)
    warmup, steps = {"gpt2": (3000, 300_000), "bert": (10_000, 2_000_000)}.get(name.split("-")[0], (2000, 100_000))
    for values, share in (({}, 1), ({"train.steps": steps // 50}, 50)):
        optimizer = resolve(preset, values).optimizer
        assert (optimizer.warmup, optimizer.decay_steps) == (warmup // share, steps // share)
    flags = {"optimizer.warmup_steps": 7, "optimizer.decay_steps": 10}
    optimizer = resolve(preset, flags).optimizer
    assert (optimizer.warmup, optimizer.decay_steps) == (7, 10), "a user's own"


@pytest.mark.parametrize(
    "preset",
    [load_preset("finetune/mnli-demo") | {"data.train": ("x",)}, DEMO | {"optimizer.warmup_steps": 0}],
    ids=["a task", "pretraining"],
)
def test_epochs_in_steps(preset: dict[str, Any]) -> None:
    """The decay of a run that goes on for more epochs stays, too."""
    preset |= {"train.global_batch": 8, "optimizer.warmup_fraction": 0.1}
    config = resolve(preset, {"train.epochs": 2.5})
    assert config.optimizer.decay_steps == 0
    found = with_total_steps(config, EPOCH)
    assert (found.train.steps, found.optimizer.decay_steps, found.optimizer.warmup) == (25, 25, 2)
    more = with_total_steps(resolve(preset, {"train.epochs": 5}), EPOCH, config.optimizer.kept_of(found.optimizer))
    assert (more.train.steps, more.optimizer.decay_steps, more.optimizer.warmup) == (50, 25, 2)


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        ({}, ""),
        ({"optimizer.schedule": "constant", "train.steps": 900}, ""),
        ({"optimizer.schedule": "constant", "train.steps": 41}, ""),
        ({"train.steps": 12}, "12 ends during the warm-up of 40 steps, at 28% of --optimizer.learning-rate 0.0015"),
        ({"optimizer.schedule": "constant", "train.steps": 40}, "40 ends during the warm-up of 40 steps, at 98% of"),
        ({"train.steps": 60}, "60 ends before --optimizer.decay-steps 100, where the learning rate would reach its"),
        ({"train.steps": 300}, "stays at its floor, --optimizer.min-learning-rate 0.0001"),
        ({"train.steps": 300, "optimizer.min_learning_rate": 0}, "rate 0, so the model stops learning"),
    ],
)
def test_an_end_that_the_schedule_was_not_made_for_is_told(values: dict[str, Any], warning: str) -> None:
    told = rate_warning(begun(values))
    assert warning in told and told.startswith("warning: --train.steps ") == bool(told) == bool(warning)


def test_a_precision_that_is_slow_on_the_devices_is_told() -> None:
    assert "--precision bf16" in precision_line("fp32", "gpu") and "fp8 is slower" in precision_line("fp8", "cpu")
    assert not any(precision_line(*fast) for fast in (("fp32", "cpu"), ("bf16", "gpu"), ("fp8", "gpu")))


def test_what_a_start_changes_is_told() -> None:
    before, now = begun({}), begun({"optimizer.learning_rate": 0.003, "optimizer.warmup_fraction": 0.1})
    assert changed_rate(before.optimizer, before.optimizer) == ""
    changes = "learning_rate 0.0015 -> 0.003, warmup 40 -> 10"
    assert changed_rate(before.optimizer, now.optimizer) == f"learning rate changed: {changes}"
