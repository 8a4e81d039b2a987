"""Tokens per second of greedy generation, beside those of `transformers` with the same weights in the same run.

    python benchmarks/generation.py [PRESET] [train.py's flags] [--batch N] [--prompt-tokens N] [--new-tokens N]
        [--threads N] [--rounds N] [--json]

PRESET is benchmarks/gpt-4x512.toml unless given; weights and prompts are random. Without `--batch`, batches of 1 and of
8 prompts are measured. Every side is a process of its own; they generate in turn, A B A B, and `ratio` is the median
over the rounds of the peer's time by ours: from the prompts to the last token, reading the prompts included. The peer
is the model that `megajax convert export-hf` would write, as its `generate` runs it.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import paired

from megajax.core.errors import UserError
from megajax.host.ending import run
from megajax.settings.config import Config
from megajax.start.launch import start

BATCHES = (1, 8)
Prompts = list[list[int]]


def our_side(config: Config, new_tokens: int) -> Callable[[Prompts], Prompts]:
    """Greedy continuations by our decoder."""
    start(config)
    import jax

    from megajax.core.mesh import shardings
    from megajax.core.program.program import Program
    from megajax.generation.choice import Sampling
    from megajax.generation.decoder import Decoder
    from megajax.verify.run import drawn_weights

    program = Program.on(config)
    layout, canonical = program.layout, drawn_weights(program)
    pipelined = {"shared": canonical["shared"], "blocks": jax.tree.map(layout.placement.to_stages, canonical["blocks"])}
    params = jax.device_put(layout.computed(pipelined), shardings(layout.mesh, layout.computed_specs))
    decoder = Decoder(program, params, Sampling(temperature=0), ends=())

    def generate(prompts: Prompts) -> Prompts:
        found: Prompts = [[] for _ in prompts]
        for piece in decoder.stream(prompts, max_tokens=new_tokens, batch=len(prompts)):
            found[piece.number] += piece.ids
        return found

    return generate


def peer_side(config: Config, new_tokens: int, threads: int) -> Callable[[Prompts], Prompts]:
    """Greedy continuations by `transformers`."""
    start(config)
    import torch
    import transformers

    from megajax.convert.families import exchange_for
    from megajax.convert.weights import to_tensors
    from megajax.core.program.program import Program
    from megajax.verify.run import drawn_weights

    torch.set_num_threads(threads)
    model, exchange = config.model, exchange_for(config.model, "", "PRESET")
    settings = exchange.settings(model, (), None)["config.json"] | {"eos_token_id": None, "pad_token_id": 0}
    peer = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**settings)).eval()
    tensors = to_tensors(exchange.places(model), drawn_weights(Program.on(config)), model)
    lacks = peer.load_state_dict({name: torch.tensor(array) for name, array in tensors.items()}, strict=False)
    assert set(lacks.missing_keys) <= {"lm_head.weight"} and not lacks.unexpected_keys, lacks  # tied to the table

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
    names = ("jax", "flax")
    if own.serve == "torch":
        generate, names = peer_side(config, own.new_tokens, own.threads), ("torch", "transformers")
    else:
        generate = our_side(config, own.new_tokens)

    def step() -> float:
        generate(prompts)
        return 0.0

    version = ", ".join(f"{name} {sys.modules[name].__version__}" for name in names)  # type: ignore[attr-defined]
    paired.serve(step, {"ids": lambda: {"ids": generate(prompts)}}, version=version)


def measure(flags: list[str], own: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Both sides in turn on one size of batch."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: own.threads]))
    options = {"--batch": batch, "--threads": own.threads}
    options |= {"--prompt-tokens": own.prompt_tokens, "--new-tokens": own.new_tokens}
    words = [str(word) for option in options.items() for word in option]
    with ExitStack() as stack:
        sides = []
        for name, extra in (("megajax", {}), ("torch", paired.KEEP_FREED_MEMORY)):
            print(f"{name}, batch {batch}: compiling and warming up", file=sys.stderr)
            command = [sys.executable, str(Path(__file__)), *flags, *words, "--serve", name]
            side = paired.Side(name, [command], cores=[cores], environment={"JAX_PLATFORMS": "cpu"} | extra)
            sides.append(stack.enter_context(side))
        (ours, theirs), _ = paired.in_turn(sides, own.rounds, 1)
        ids = [side.ask("ids")["ids"] for side in sides]
    tokens = batch * own.new_tokens
    ratios = paired.ratios(theirs, ours)
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
    threads = min(2, len(os.sched_getaffinity(0)))
    own, flags, config = paired.command_line(
        __doc__, batch=int, prompt_tokens=32, new_tokens=64, threads=threads, rounds=5, json=False,
        serve=(None, "megajax", "torch"),
    )  # fmt: skip
    length, most = config.model.sequence_length, own.prompt_tokens + own.new_tokens
    if most > length:
        raise UserError(f"--prompt-tokens + --new-tokens {most}; valid: at most {length}, --model.sequence-length")
    if own.serve:
        work(config, own)
        return
    if not importlib.util.find_spec("transformers") or not importlib.util.find_spec("torch"):
        raise UserError("PyTorch and transformers are not installed; pip install -e '.[peer]' brings them")
    about = paired.this_run() | {"threads": own.threads}
    results = [measure(flags, own, batch) for batch in ([own.batch] if own.batch else BATCHES)]
    print(f"{'':10}{'megajax':>12}{'transformers':>14}  tokens/s")
    for result in results:
        ours, theirs = result["tokens_per_second"], result["peer_tokens_per_second"]
        same = "same ids" if result["same_ids"] else "ids differ"
        print(f"batch {result['batch']:<4}{ours:12,.1f}{theirs:14,.1f}  ratio {result['ratio']:.2f}, {same}")
    if own.json:
        print(json.dumps({"batches": results, "run": about}))


if __name__ == "__main__":
    run(main)
