"""LoRA by the commands: from a run of all weights to one of adapters, and what is done with it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from processes import Commands, Run
from results import assert_same_checkpoint, checkpoint_arrays, curve, training, validation
from safetensors.numpy import load_file

RANK = ("--lora.rank", 4)
STEPS = 4
FLAGS = (*RANK, "--checkpoint.every", 2, "--checkpoint.keep", 1, "--optimizer.warmup-steps", 1, "--train.microbatch", 4)


@pytest.mark.full
def test_a_run_of_adapters(commands: Commands, half: Run, corpus: Path, tmp_path: Path) -> None:
    """Two steps and two more are four, bit for bit, without the other run; frozen weights are as they were."""
    base, run, whole = shutil.copytree(half.folder, tmp_path / "base"), tmp_path / "run", tmp_path / "whole"
    told = commands.train(whole, "--init", base, *FLAGS, "--train.steps", STEPS).out
    assert f"weights: from step 10 of {base}; fresh: none; frozen, with fresh adapters of rank 4" in told
    assert "LoRA: 6,912 trainable parameters" in told
    commands.train(run, "--init", base, *FLAGS, "--train.steps", 2)
    frozen = {name: leaf for name, leaf in checkpoint_arrays(base, 10).items() if name.startswith("['params']")}
    shutil.rmtree(base)
    commands.train(run, "--train.steps", STEPS, preset=run / "config.toml")
    assert curve(run) == curve(whole)
    assert_same_checkpoint(run, whole, STEPS)
    arrays = checkpoint_arrays(run, STEPS)
    assert frozen and all(arrays[name].tobytes() == leaf.tobytes() for name, leaf in frozen.items())
    assert any(name.startswith("['params']['lora']") and leaf.any() for name, leaf in arrays.items())
    assert not any("lora" not in name for name in arrays if "mu" in name and "params" in name)
    found = commands.perplexity(run)
    assert found["step"] == STEPS and found["loss"] == pytest.approx(validation(run)[STEPS], rel=1e-6)
    assert validation(run)[STEPS] < training(run)[0]["loss"]


@pytest.mark.full
def test_further_uses(commands: Commands, half: Run, tmp_path: Path) -> None:
    """Text is generated, both exports are written, and a run begins with the merged weights, also one of adapters."""
    run = tmp_path / "run"
    commands.train(run, "--init", half.folder, *FLAGS, "--lora.targets", "attention", "down", "--train.steps", STEPS)
    text = commands.run("-m", "megajax", "generate", "--checkpoint", run, "--prompt", "the end", "--max-tokens", 4)
    assert text.ok().startswith("the end")
    for name, flags in (("merged", ()), ("adapter", ("--adapter",))):
        commands.run("-m", "megajax", "convert", "export-hf", run, tmp_path / name, *flags).ok()
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    adapters = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["attn.c_attn", "attn.c_proj", "mlp.c_proj"] and settings["fan_in_fan_out"]
    arrays = checkpoint_arrays(run, STEPS)
    down, name = arrays["['params']['blocks']['mlp']['down']['weight']"], "transformer.h.1.mlp.c_proj"
    a, b = (adapters[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
    np.testing.assert_allclose(merged[f"{name}.weight"], down[1] + 16 / 4 * (b @ a).T, rtol=0, atol=1e-7)
    for name, flags in (("again", ()), ("further", RANK)):
        told = commands.train(tmp_path / name, "--init", run, *flags, "--train.steps", 1).out
        assert f"weights: from step {STEPS} of {run}; fresh: none" in told
        weights = commands.perplexity(run)["loss"]
        assert training(tmp_path / name)[0]["loss"] != 0 and weights > 0
    arrays = checkpoint_arrays(tmp_path / "further", 1)
    taken = arrays["['params']['blocks']['mlp']['down']['weight']"][1]
    np.testing.assert_allclose(taken, merged["transformer.h.1.mlp.c_proj.weight"], rtol=0, atol=1e-7)
