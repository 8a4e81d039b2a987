"""LoRA as `peft` computes it on models of `transformers`: loss, gradients and updates, and what is exported."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hugging_face import CLASSES, PEER_SIZES, SETTINGS, peer_model, tensors_in
from tiny import full, tiny_program

from megajax.convert.adapters import export_adapter, joined_tensors
from megajax.convert.exporting import export_config, export_hf
from megajax.convert.importing import import_hf, open_source
from megajax.core.config import MeshConfig
from megajax.core.models.lora_config import LoraConfig
from megajax.core.optim.config import OptimizerConfig
from megajax.core.program.scoring import logits
from megajax.core.program.train_step import train_step_with_gradients
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.init import first_state
from megajax.runs.ownership import IMPORTED
from megajax.settings.config import Config, to_toml
from megajax.verify import named_leaves

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks for it
]
torch = pytest.importorskip("torch", reason="the extra `peer` is not installed")
pytest.importorskip("transformers", reason="the extra `peer` is not installed")
peft = pytest.importorskip("peft", reason="the extra `peer` is not installed")

LENGTH, VOCABULARY, RATE = 21, 211, 1e-2
EPSILON = 1e-4  # with less, Adam makes full updates of gradients that are nothing but rounding (`verify/check.steady`)
SIZES = PEER_SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
SIZES |= {"num_hidden_layers": 2, "num_key_value_heads": 3}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 48, "n_layer": 2, "n_head": 6}
DEEPSEEK = SETTINGS["deepseek_v3"] | {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
OF_KIND = {"gpt2": GPT2, "deepseek_v3": DEEPSEEK}
ALL, ONE_MODULE_EACH = ("attention", "mlp"), ("output", "mlp")
CASES = [  # what transformers calls it, the mesh, the targets
    ("llama", (1, 1, 6), ALL),  # each of three heads of keys and values on two devices
    ("qwen3", (2, 1, 3), ("query", "value", "up", "down")),
    ("gpt2", (1, 2, 2), ONE_MODULE_EACH),
    full("qwen2", (1, 1, 1), ALL),
    full("deepseek_v3", (1, 1, 2), ("attention",)),
    full("mistral", (1, 2, 1), ("key", "output", "gate")),
]


class Tuning:
    """A LoRA run of ours that begins with a model of transformers, and steps on random batches."""

    def __init__(self, folder: Path, kind: str, mesh: tuple[int, int, int], targets: tuple[str, ...]):
        self.folder, self.run = folder, folder / "run"
        peer = peer_model(CLASSES[kind], **OF_KIND.get(kind, SIZES))
        peer.save_pretrained(folder / "hf")
        # Loops over experts, if there are any, can do fp64 and any width.
        self.loops = {"attn_implementation": "eager"}
        self.loops |= {"experts_implementation": "eager"} if "num_experts_per_tok" in OF_KIND.get(kind, SIZES) else {}
        self.peer = type(peer).from_pretrained(folder / "hf", **self.loops).double().eval()
        source = open_source(folder / "hf", {"model.vocab_multiple": 48, "model.scan_layers": "true"})
        import_hf(source, folder / "base")
        self.config: Config = dataclasses.replace(
            source.config,
            precision="fp64",  # only transformers rounds to fp32, in its norms
            init=str(folder / "base"),
            run_dir=str(self.run),
            lora=LoraConfig(rank=4, alpha=6.0, targets=targets),
            mesh=MeshConfig(data=mesh[0], pipe=mesh[1], tensor=mesh[2]),
            train=dataclasses.replace(source.config.train, steps=9, global_batch=4, microbatch=2),
            optimizer=OptimizerConfig(
                learning_rate=RATE, schedule="constant", weight_decay=0.1, clip_norm=1e9, zero=1, epsilon=EPSILON
            ),
        )
        self.program = tiny_program(self.config)
        self.state, self.told = first_state(self.config, self.program)
        self.checkpoints = Checkpoints(self.run, self.program.layout, keep=9)
        (self.run / "config.toml").write_text(to_toml(self.config))
        (self.run / IMPORTED).write_bytes((folder / "base" / IMPORTED).read_bytes())

    def batch(self, number: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(number)
        return {name: rng.integers(0, VOCABULARY, (4, LENGTH), np.int32) for name in ("tokens", "targets")}

    def step(self, number: int) -> tuple[float, dict[str, np.ndarray]]:
        """The loss of a step, and the adapters' gradients by their names there."""
        placed = self.program.put_batch(self.batch(number), self.program.local_rows)
        self.state, metrics, grads = train_step_with_gradients(self.program)(self.state, placed)
        canonical = self.program.layout.canonical_weights(jax.device_get(grads))
        named = {tuple(name.split("/")): leaf for name, leaf in named_leaves(canonical).items()}
        return float(metrics["loss"]), joined_tensors(self.run, self.config, named)

    def export(self, step: int) -> Path:
        """The adapters of now, as a folder of `peft`."""
        self.checkpoints.save(step, self.state)
        self.checkpoints.wait()
        export_adapter(self.run, export_config(self.run), self.folder / f"adapter-{step}", dtype=None)
        return self.folder / f"adapter-{step}"


def assert_logits(tuning: Tuning, peer: Any, number: int) -> None:
    batch, program = tuning.batch(number), tuning.program
    with torch.no_grad():
        theirs = peer(torch.tensor(batch["tokens"]).long()).logits.numpy()
    ours = np.asarray(logits(program)(tuning.state.params, program.put_batch(batch, program.local_rows)))
    np.testing.assert_allclose(ours[..., :VOCABULARY], theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


@pytest.fixture(autouse=True)
def fp64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(("kind", "mesh", "targets"), CASES)
def test_as_peft_trains(kind: str, mesh: tuple[int, int, int], targets: tuple[str, ...], tmp_path: Path) -> None:
    """From the same adapters the same losses and gradients in each of three steps, with AdamW between them; what is
    exported then, as an adapter and merged, has our logits there."""
    tuning = Tuning(tmp_path, kind, mesh, targets)
    assert "fresh: none; frozen, with fresh adapters of rank 4" in tuning.told
    peer = peft.PeftModel.from_pretrained(tuning.peer, tuning.export(0), is_trainable=True).double()
    trained = {name.replace(".default", ""): each for name, each in peer.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, betas=(0.9, 0.999), eps=EPSILON, weight_decay=0.1)
    for number in range(3):
        loss, gradients = tuning.step(number)
        batch = tuning.batch(number)
        optimizer.zero_grad()
        of_tokens = peer(torch.tensor(batch["tokens"]).long()).logits.flatten(0, 1)
        theirs = torch.nn.functional.cross_entropy(of_tokens, torch.tensor(batch["targets"]).long().ravel())
        theirs.backward()
        assert loss == pytest.approx(theirs.item(), rel=2e-6)
        assert gradients.keys() == trained.keys()
        size = np.sqrt(sum(np.sum(each.grad.numpy() ** 2) for each in trained.values()))
        for name, parameter in trained.items():
            wanted = parameter.grad.numpy()
            error = np.linalg.norm(gradients[name] - wanted)
            assert error <= 2e-5 * max(np.linalg.norm(wanted), 1e-3 * size), (number, name)
        optimizer.step()
    again = type(tuning.peer).from_pretrained(tmp_path / "hf", **tuning.loops)
    adapted = peft.PeftModel.from_pretrained(again, tuning.export(3)).eval()
    assert_logits(tuning, adapted, 7)
    export_hf(tuning.run, export_config(tuning.run), tmp_path / "merged")
    merged = type(tuning.peer).from_pretrained(tmp_path / "merged", **tuning.loops).eval()
    assert_logits(tuning, merged, 8)
    ours, theirs = open_source(tmp_path / "hf", None, tmp_path / "adapter-3"), open_source(tmp_path / "merged")
    for name in tensors_in(tmp_path / "merged").keys() - {"lm_head.weight"}:
        np.testing.assert_allclose(ours.weights.read(name), theirs.weights.read(name), rtol=0, atol=1e-6)


@pytest.mark.parametrize("targets", [("query", "value", "down"), full(ALL)])
def test_several_products_in_one_module(targets: tuple[str, ...], tmp_path: Path) -> None:
    """GPT-2's `c_attn` is three products of ours: there the adapters together have more ranks, and our logits."""
    tuning = Tuning(tmp_path, "gpt2", (1, 1, 1), targets)
    for number in range(2):
        tuning.step(number)
    again = type(tuning.peer).from_pretrained(tmp_path / "hf", **tuning.loops)
    adapted = peft.PeftModel.from_pretrained(again, tuning.export(2)).eval()
    assert_logits(tuning, adapted, 5)
