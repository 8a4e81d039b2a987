"""Tokens per second of greedy generation, beside those of `transformers` with the same weights in the same run.

    python benchmarks/generation.py [PRESET] [train.py's flags] [--batch N] [--prompt-tokens N] [--new-tokens N]
        [--threads N] [--rounds N] [--json]

PRESET is benchmarks/gpt-4x512.toml unless given; weights and prompts are random. Without `--batch`, batches of 1 and of
8 prompts are measured. Every side is a process of its own; they generate in turn, A B A B, and `ratio` is the median
over the rounds of the peer's time by ours: from the prompts to the last token, reading the prompts included. The peer
is Hugging Face's GPT-2 as its `generate` runs it.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paired import KEEP_FREED_MEMORY, Side, in_turn, parse_own, serve

from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.host.ending import run
from megajax.settings.config import Config
from megajax.settings.flags import parse
from megajax.start.launch import start

BENCHMARKS = Path(__file__).resolve().parent
BATCHES = (1, 8)
Prompts = list[list[int]]
PROJECTIONS = "query", "key", "value"


def random_weights(model: ModelConfig) -> dict[str, Any]:
    """Weights in our canonical form, the same for every side; padded rows of the table are not drawn."""
    rng = np.random.default_rng(0)
    layers, hidden, heads = model.num_layers, model.hidden_size, (model.num_heads, model.head_size)

    def draw(*shape: int) -> np.ndarray:
        return 0.02 * rng.standard_normal(shape, np.float32)

    def linear(*shape: int, inputs: int = 1) -> dict[str, np.ndarray]:
        return {"weight": draw(layers, *shape), "bias": draw(layers, *shape[inputs:])}

    def norm(*shape: int) -> dict[str, np.ndarray]:
        return {"scale": 1 + draw(*shape), "bias": draw(*shape)}

    table = np.zeros((model.padded_vocab_size, hidden), np.float32)
    table[: model.vocab_size] = draw(model.vocab_size, hidden)
    return {
        "shared": {"table": table, "positions": draw(model.sequence_length, hidden), "final_norm": norm(hidden)},
        "blocks": {
            "attention_norm": norm(layers, hidden),
            "attention": {part: linear(hidden, *heads) for part in PROJECTIONS}
            | {"output": linear(*heads, hidden, inputs=2)},
            "mlp_norm": norm(layers, hidden),
            "mlp": {"up": linear(hidden, model.mlp_size), "down": linear(model.mlp_size, hidden)},
        },
    }


def our_side(config: Config, new_tokens: int) -> Callable[[Prompts], Prompts]:
    """Greedy continuations by our decoder."""
    start(config)
    import jax

    from megajax.core.mesh import shardings
    from megajax.core.program.program import Program
    from megajax.generation.choice import Sampling
    from megajax.generation.decoder import Decoder

    program = Program.on(config)
    layout, canonical = program.layout, random_weights(config.model)
    pipelined = {"shared": canonical["shared"], "blocks": jax.tree.map(layout.placement.to_stages, canonical["blocks"])}
    params = jax.device_put(layout.computed(pipelined), shardings(layout.mesh, layout.specs.params))
    decoder = Decoder(program, params, Sampling(temperature=0), ends=())

    def generate(prompts: Prompts) -> Prompts:
        found: Prompts = [[] for _ in prompts]
        for piece in decoder.stream(prompts, max_tokens=new_tokens, batch=len(prompts)):
            found[piece.number] += piece.ids
        return found

    return generate


def peer_side(config: Config, new_tokens: int, threads: int) -> Callable[[Prompts], Prompts]:
    """Greedy continuations by `transformers`."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    model, weights = config.model, random_weights(config.model)
    settings = transformers.GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.sequence_length,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    peer = transformers.GPT2LMHeadModel(settings).eval()
    blocks, shared = weights["blocks"], weights["shared"]
    named = {"wte": shared["table"][: model.vocab_size], "wpe": shared["positions"]}
    tensors = {f"transformer.{name}.weight": array for name, array in named.items()}
    norms = {"ln_f": shared["final_norm"]}
    parts = [blocks["attention"][part] for part in PROJECTIONS]
    joint = {name: np.stack([part[name] for part in parts], axis=-3) for name in ("weight", "bias")}
    for layer in range(model.num_layers):
        products = {
            "attn.c_attn": joint,
            "attn.c_proj": blocks["attention"]["output"],
            "mlp.c_fc": blocks["mlp"]["up"],
            "mlp.c_proj": blocks["mlp"]["down"],
        }
        for name, part in products.items():
            size = {"attn.c_attn": model.hidden_size, "mlp.c_fc": model.hidden_size}.get(name)
            weight = part["weight"][layer]
            weight = weight.reshape(size, -1) if size else weight.reshape(-1, model.hidden_size)
            tensors[f"transformer.h.{layer}.{name}.weight"] = weight
            tensors[f"transformer.h.{layer}.{name}.bias"] = part["bias"][layer].reshape(-1)
        for name, key in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
            norms[f"h.{layer}.{name}"] = {part: array[layer] for part, array in blocks[key].items()}
    for name, part in norms.items():
        tensors[f"transformer.{name}.weight"], tensors[f"transformer.{name}.bias"] = part["scale"], part["bias"]
    missing = peer.load_state_dict({name: torch.tensor(array) for name, array in tensors.items()}, strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys, missing  # tied to the table

    @torch.inference_mode()
    def generate(prompts: Prompts) -> Prompts:
        ids = torch.tensor(prompts)
        found = peer.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        return found[:, ids.shape[1] :].tolist()

    return generate


def work(config: Config, own: argparse.Namespace) -> None:
    """Be a side."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, config.model.vocab_size, (own.batch, own.prompt_tokens)).tolist()
    if own.serve == "torch":
        generate = peer_side(config, own.new_tokens, own.threads)
    else:
        generate = our_side(config, own.new_tokens)

    def step() -> float:
        generate(prompts)
        return 0.0

    serve(step, {"ids": lambda: {"ids": generate(prompts)}}, version=_version(own.serve))


def _version(side: str) -> str:
    names = ("torch", "transformers") if side == "torch" else ("jax", "flax")
    return ", ".join(f"{name} {sys.modules[name].__version__}" for name in names)  # type: ignore[attr-defined]


def measure(flags: list[str], own: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Both sides in turn on one size of batch."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: own.threads]))
    options = {"--batch": batch, "--threads": own.threads}
    options |= {"--prompt-tokens": own.prompt_tokens, "--new-tokens": own.new_tokens}
    words = [str(word) for option in options.items() for word in option]
    sides: list[Side] = []
    try:
        for name, extra in (("megajax", {}), ("torch", KEEP_FREED_MEMORY)):
            print(f"{name}, batch {batch}: compiling and warming up", file=sys.stderr)
            command = [sys.executable, str(Path(__file__)), *flags, *words, "--serve", name]
            sides.append(Side(name, [command], cores=[cores], environment={"JAX_PLATFORMS": "cpu"} | extra))
        ours, theirs = in_turn(sides, own.rounds, 1)
        ids = [side.ask("ids")["ids"] for side in sides]
    finally:
        for side in sides:
            side.close()
    tokens = batch * own.new_tokens
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {
        "batch": batch,
        "tokens_per_second": tokens / statistics.median(ours),
        "peer_tokens_per_second": tokens / statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "same_ids": ids[0] == ids[1],
        "seconds": {"megajax": ours, "transformers": theirs},
        "sides": {side.name: side.about["version"] for side in sides},
    }


def main() -> None:
    """Parse the command line, then measure, or serve."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=("megajax", "torch"))
    own, flags = parse_own(parser)
    if not flags or flags[0].startswith("--"):
        flags = [str(BENCHMARKS / "gpt-4x512.toml"), *flags]
    config = parse(flags, str(__doc__).partition("\n")[0], "generation.py [--batch N] [--json]")
    length, most = config.model.sequence_length, own.prompt_tokens + own.new_tokens
    if most > length:
        raise UserError(f"--prompt-tokens + --new-tokens {most}; valid: at most {length}, --model.sequence-length")
    if own.serve:
        work(config, own)
        return
    if not importlib.util.find_spec("transformers") or not importlib.util.find_spec("torch"):
        raise UserError("PyTorch and transformers are not installed; pip install -e '.[peer]' brings them")
    load = os.getloadavg()[0]
    results = [measure(flags, own, batch) for batch in ([own.batch] if own.batch else BATCHES)]
    print(f"{'':10}{'megajax':>12}{'transformers':>14}  tokens/s")
    for result in results:
        ours, theirs = result["tokens_per_second"], result["peer_tokens_per_second"]
        same = "same ids" if result["same_ids"] else "ids differ"
        print(f"batch {result['batch']:<4}{ours:12,.1f}{theirs:14,.1f}  ratio {result['ratio']:.2f}, {same}")
    if own.json:
        machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {load:.1f} at the start"
        command = " ".join(["python", "benchmarks/generation.py", *sys.argv[1:]])
        about = {"command": command, "date": datetime.date.today().isoformat(), "machine": machine}
        print(json.dumps({"batches": results, "run": about | {"threads": own.threads}}))


if __name__ == "__main__":
    run(main)
