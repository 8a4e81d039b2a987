"""The PyTorch baseline trains as we do: same weights and batches, same losses, on every mesh it knows."""

import contextlib
import dataclasses
import importlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import LLAMA, QWEN3, tiny_config, tiny_program

from megajax.core.batch import IGNORED
from megajax.core.optim.config import OptimizerConfig
from megajax.core.program.train_step import train_step
from megajax.data.synthetic import random_batch
from megajax.settings.config import Config, to_toml

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch", reason="the extra `peer` is not installed")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # scripts beside each other, not a package
Baseline = importlib.import_module("pytorch.baseline").Baseline  # needs torch

STEPS = 8
CLIP = 1.0
# Words of the models, and a norm that the gradients of some steps are above, others below.
MODELS: dict[str, tuple[dict, float]] = {
    "gpt2": ({}, CLIP),
    "bert, pre": ({"family": "bert", "layer_order": "pre"}, 2.2),
    "bert, post": ({"family": "bert", "layer_order": "post"}, 2.2),
    "llama": (LLAMA, CLIP),
    "mistral": (LLAMA | {"rope_scaling": "linear", "sliding_window": 5}, CLIP),
    "qwen2": (LLAMA | {"rope_scaling": "linear", "bias": "query-key-value", "tied_embedding": True}, 2.0),
    "qwen3": (QWEN3, 2.0),
}

# One process of several: for each preset and its HOST:PORT, steps on the batches of a file. Prints losses as JSON.
PROCESS = """
import json, sys
folder, batches, process, *runs = sys.argv[1:]
sys.path.insert(0, folder)
import numpy as np
import torch
from pytorch.baseline import Baseline
from megajax.settings.flags import parse
assert "jax" not in sys.modules
torch.set_num_threads(1)
batches, losses = np.load(batches), []
for preset, coordinator in zip(runs[::2], runs[1::2]):
    flags = f"--distributed.coordinator {coordinator} --distributed.num-processes 2 --distributed.process-id {process}"
    baseline = Baseline(parse([preset, *flags.split()], ""))
    losses.append([baseline.step({"tokens": x, "targets": y}) for x, y in zip(batches["tokens"], batches["targets"])])
    torch.distributed.destroy_process_group()
print(json.dumps(losses))
"""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Two threads of a small product wait for each other most of the time on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def learning_config(*mesh: int, clip: float = CLIP, **model) -> Config:
    """A model that learns visibly within `STEPS`, its gradients clipped in some steps."""
    config = tiny_config(mesh or (1, 1, 1), microbatch=2, dropout=0.0, init_std=0.1, **model)
    optimizer = OptimizerConfig(
        learning_rate=2e-2,
        min_learning_rate=1e-3,
        warmup_steps=2,
        decay_steps=STEPS - 1,
        weight_decay=0.1,
        clip_norm=clip,
    )
    return dataclasses.replace(config, optimizer=optimizer)


def make_batches(config: Config) -> dict[str, np.ndarray]:
    """Batches over few tokens, [STEPS, rows, T]; a fifth of the targets is ignored, and most of the first rows'."""
    rows, length = config.train.global_batch, config.model.sequence_length
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 20, (STEPS, rows, length + 1), np.int32)
    ignored = rng.random((STEPS, rows, length)) < np.where(np.arange(rows) < rows // 2, 0.7, 0.2)[:, None]
    return {"tokens": tokens[..., :-1], "targets": np.where(ignored, np.int32(IGNORED), tokens[..., 1:])}


def losses(baseline: Baseline, batches: dict[str, np.ndarray]) -> list[float]:
    return [baseline.step({name: array[step] for name, array in batches.items()}) for step in range(STEPS)]


def make_pairs(config: Config) -> dict[str, np.ndarray]:
    """Two batches of pairs in turn, [STEPS, rows, …], over few tokens."""
    few = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=20))
    batches = [random_batch(few, step % 2) for step in range(STEPS)]
    return {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}


@pytest.mark.parametrize(("words", "clip"), MODELS.values(), ids=MODELS)
def test_losses_and_final_weights_are_ours(words: dict, clip: float):
    if words:
        pytest.importorskip("transformers", reason="the extra `peer` is not installed")
    pairs = "family" in words
    config = learning_config(clip=clip, **words)
    batches = make_pairs(config) if pairs else make_batches(config)
    program, baseline = tiny_program(config), Baseline(config)
    state = program.layout.init()
    baseline.load(jax.device_get(program.layout.to_canonical(state)).params)
    expected, norms = [], []
    for step in range(STEPS):
        batch = program.put_batch({name: array[step] for name, array in batches.items()}, program.local_rows)
        state, metrics = train_step(program)(state, batch)
        expected.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    assert expected[-1] < 0.8 * expected[0]
    assert min(norms) < clip < max(norms)
    assert losses(baseline, batches) == pytest.approx(expected, rel=1e-5)

    final = Baseline(config)
    final.load(jax.device_get(program.layout.to_canonical(state)).params)
    weights = dict(baseline.model.named_parameters())
    by_rounding = STEPS * config.optimizer.learning_rate  # a key's bias changes nothing: Adam moves it all the same
    for name, weight in final.model.named_parameters():
        most = by_rounding if name.endswith(("key.bias", "k_proj.bias")) else 2e-3
        np.testing.assert_allclose(weights[name].detach(), weight.detach(), rtol=0, atol=most, err_msg=name)


def test_what_changes_next_to_nothing():
    """Layers that are computed again, and half precision."""
    config = learning_config()
    batches, recomputed = make_batches(config), dataclasses.replace(config.train, remat="layer")
    expected = losses(Baseline(config), batches)
    for changes, limit in (({"train": recomputed}, 1e-6), ({"precision": "bf16"}, 2e-2)):
        found = losses(Baseline(dataclasses.replace(config, **changes)), batches)
        assert found == pytest.approx(expected, rel=limit)


def test_two_processes_train_as_one(tmp_path: Path):
    config = learning_config()
    batches = make_batches(config)
    np.savez(tmp_path / "batches.npz", **batches)
    runs: list[object] = []
    with contextlib.ExitStack() as stack:
        for mesh in (2, 1, 1), (1, 1, 2):
            preset = tmp_path / f"{mesh}.toml"
            preset.write_text(to_toml(learning_config(*mesh)))
            free = stack.enter_context(socket.socket())
            free.bind(("localhost", 0))
            runs += [preset, f"localhost:{free.getsockname()[1]}"]
    processes = [
        subprocess.Popen(
            list(map(str, [sys.executable, "-c", PROCESS, BENCHMARKS, tmp_path / "batches.npz", number, *runs])),
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    expected = losses(Baseline(config), batches)
    for process in processes:
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        for actual in json.loads(out):
            assert actual == pytest.approx(expected, rel=1e-5)
