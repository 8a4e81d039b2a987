"""A family is added by its model and a name: nothing else knows of it (`tiny_family.py`)."""

import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import drawn_params, full, tiny_config, tiny_program

from megajax.core.models.flops import step_flops
from megajax.core.models.registry import FAMILIES, FamilyEntry
from megajax.core.models.staged import count_parameters
from megajax.core.program.scoring import next_logits
from megajax.data.synthetic import random_batch
from megajax.settings.presets import load_preset, resolve
from megajax.verify.exact import compare_exactly
from megajax.verify.fields import run_step
from megajax.verify.forms import in_blocks, plain

MODEL = {"family": "tiny", "num_layers": 3, "sequence_length": 8, "global_batch": 8, "num_heads": 4}


@pytest.fixture(autouse=True, scope="module")
def registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        patch.setitem(FAMILIES, "tiny", FamilyEntry("tiny_family"))
        yield
    sys.modules.pop("tiny_family", None)


@pytest.mark.parametrize(
    "options",
    [
        full({"vocabulary": "split", "zero": 3, "sequence_parallel": True, "remat": "stage"}),
        full({"schedule": "interleaved", "chunks": 2, "remat": "selective"}),
    ],
    ids=["split", "interleaved"],
)
def test_it_trains_on_every_mesh(options):
    """(2, 2, 2), with and without all that can be sharded: losses, every gradient and all new weights, exactly.
    Figures of layers are summed over layers, microbatches and devices, each once, whatever is recomputed; one stage has
    fewer layers."""
    config = tiny_config((2, 2, 2), microbatch=2, **options, **MODEL)
    expected, found = run_step(plain(config)), run_step(config, in_blocks(config))
    assert all(each.passed for each in compare_exactly(expected, found))
    for step in (expected, found):
        assert step.gradients["shared/embedding_norm/scale"].any() and step.gradients["shared/table"].any()
        assert (step.taken.metrics["layers/tokens"] == 3 * 8 * 8).all()
        assert (step.taken.metrics["layers/numbered"] == (1 + 2 + 3) * sum(range(8)) * 8).all()


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
