"""A family is added by its model and a name: nothing else knows of it (`tiny_family.py`)."""

import sys
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import drawn_params, full, tiny_config, tiny_program

from megajax.models.family import count_parameters, step_flops
from megajax.models.registry import FAMILIES, Entry
from megajax.program.scoring import next_logits
from megajax.program.synthetic import random_batch
from megajax.settings.presets import load_preset, resolve
from megajax.verify import compare
from megajax.verify.run import MeshRun, run

MODEL = {"family": "tiny", "num_layers": 3, "sequence_length": 16, "global_batch": 8}


@pytest.fixture(autouse=True, scope="module")
def registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        patch.setitem(FAMILIES, "tiny", Entry("tiny_family"))
        yield
    sys.modules.pop("tiny_family", None)


@cache
def reference() -> MeshRun:
    return run(tiny_config(microbatch=4, remat="layer", **MODEL), jax.devices(), 2)


@pytest.mark.parametrize(
    "options",
    [
        {"vocabulary": "split", "zero": 3, "sequence_parallel": True, "remat": "stage"},
        full({"schedule": "interleaved", "chunks": 2, "remat": "selective"}),
    ],
    ids=["split", "interleaved"],
)
def test_it_trains_on_every_mesh(options):
    """(2, 2, 2), with and without all that can be sharded: losses and every gradient, those of the new weights too.
    Figures of layers are summed over layers, microbatches and devices, each once, whatever is recomputed; one stage has
    fewer layers."""
    expected, found = reference(), run(tiny_config((2, 2, 2), microbatch=2, **options, **MODEL), jax.devices(), 2)
    assert compare(expected, found).within(), compare(expected, found)
    norms = {name: np.linalg.norm(leaf) for name, leaf in expected.gradients[1].items()}
    assert norms["shared/embedding_norm/scale"] > 1e-3 and norms["shared/table"] > 1e-3
    for metrics in (expected.metrics[0], found.metrics[0]):
        assert metrics["layers/tokens"] == 3 * 8 * 16
        assert metrics["layers/numbered"] == (1 + 2 + 3) * sum(range(8)) * 16


def test_it_is_another_model():
    """It has two weights of the hidden size more than GPT-2, which are used (above), and sees less (below)."""
    gpt2 = tiny_config(**MODEL | {"family": "gpt2"})
    config = tiny_config(**MODEL).model
    assert count_parameters(config) == count_parameters(gpt2.model) + 2 * config.hidden_size
    assert step_flops(config, 1) == step_flops(gpt2.model, 1)


def test_its_window_is_seen():
    """A token moves the logits that it can reach through three layers of windows of five tokens, and no others."""
    model = MODEL | {"sequence_length": 24, "init_std": 0.3}  # else what comes through is lost in rounding
    program = tiny_program(tiny_config(microbatch=8, dropout=0.0, **model))
    params = drawn_params(program)
    batch = random_batch(program.config, 0)
    changed = {name: array.copy() for name, array in batch.items()}
    changed["tokens"][:, 3] = (changed["tokens"][:, 3] + 1) % 100

    def logits(place: int) -> list[np.ndarray]:
        return [np.asarray(next_logits(program)(params, arrays, np.int32(place))) for arrays in (batch, changed)]

    near, far = logits(3 + 3 * 4), logits(3 + 3 * 4 + 1)
    assert (near[0] != near[1]).any() and (far[0] == far[1]).all()


def test_configurations_know_it():
    """As a flag, and where a name is wrong."""
    assert resolve(load_preset("demo"), {"model.family": "tiny"}).model.family == "tiny"
    with pytest.raises(ValueError, match=r"--model\.family.*'tinny'.*gpt2.*tiny"):
        resolve(load_preset("demo"), {"model.family": "tinny"})
