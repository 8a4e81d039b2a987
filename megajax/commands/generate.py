"""`megajax generate`: continue prompts with the model of a run."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from typing import Any

from megajax.config import Config
from megajax.errors import UserError
from megajax.generation.options import GenerateOptions
from megajax.host.paths import check_path
from megajax.options import Option
from megajax.settings.flags import Parser, add_flag
from megajax.traits import IS_PATH

CONFIG_FLAGS = ("mesh", "distributed", "simulate_devices", "precision", "compilation_cache", "compilation_cache_size")


def main(argv: Sequence[str]) -> None:
    """Restore the checkpoint of the command line and print continuations while they are generated."""
    parser = Parser(
        "Continue texts by a trained model.",
        "megajax generate --checkpoint RUN --prompt TEXT [--prompt TEXT ...] | --prompt-file FILE [--flag value ...]",
    )
    checkpoint = Option("checkpoint", str, MISSING, "run directory of the training", traits=(IS_PATH,))
    add_flag(parser, checkpoint, required=True)
    parser.add_weights()
    parser.add_argument("--step", default="latest", help="a step, latest, or best (lowest validation loss) [latest]")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="text to continue; repeatable")
    parser.add_path("--prompt-file", default="", metavar="FILE", help="text with a prompt on every line")
    parser.add_config_flags(owner=GenerateOptions)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_config_flags(*CONFIG_FLAGS)
    args = parser.parse_args(argv)
    check_path(args.checkpoint, "--checkpoint")
    options = GenerateOptions(**parser.overrides(args, GenerateOptions))
    overrides = parser.overrides(args, Config)
    if overrides.get("mesh.pipe", 1) != 1:
        raise UserError(f"--mesh.pipe {overrides['mesh.pipe']}: generation has no pipeline; valid: --mesh.pipe 1")

    from megajax.generation.text import read_prompts
    from megajax.host.processes import is_first_process

    prompts = read_prompts(args.prompt, args.prompt_file)
    report = continue_texts(Path(args.checkpoint), args.step, prompts, options, overrides, show=not args.json)
    if is_first_process():
        if args.json:
            print(json.dumps(report))
        else:
            note = partial(print, file=sys.stderr)  # standard output has the texts alone
            for number, found in enumerate(report["continuations"], start=1):
                if found["stopped_by"] == "context":
                    note(f"prompt {number} was continued to the end of the context only, by {found['tokens']} tokens")
            note(f"{report['tokens']} tokens, {report['tokens_per_second']:.1f} tokens/s")


def continue_texts(
    run_dir: Path, step: str, prompts: list[str], options: GenerateOptions, overrides: dict[str, Any], *, show: bool
) -> dict[str, Any]:
    """Continue prompts with the model of a run. `overrides` replace values of the run's configuration; with `show` the
    texts are also printed as they come. Returns the report of `--json`."""
    from megajax.generation.choice import Sampling
    from megajax.generation.decoder import Decoder
    from megajax.generation.text import Screen, continuation_text
    from megajax.host.processes import is_first_process
    from megajax.runs.trained import TrainedModel, evaluation_config, run_tokenizer

    of_training = {"optimizer.zero": 1, "sequence_parallel": False, "train.microbatch": 1}
    config = evaluation_config(run_dir, overrides | of_training)
    tokenizer = run_tokenizer(run_dir, config)
    ids = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    length = config.model.sequence_length
    for number, prompt in enumerate(ids, start=1):
        if len(prompt) > length:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens; valid: at most {length}, the context of {run_dir}"
            )
    trained = TrainedModel.restore(run_dir, config, step)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    decoder = Decoder(trained.program, trained.params, sampling, tokenizer.ends)
    found_step = trained.step
    del trained  # the decoder has its own form of the weights
    screen = Screen(tokenizer, prompts, ids) if show and is_first_process() else None
    new: list[list[int]] = [[] for _ in prompts]
    stops: list[str | None] = [None] * len(prompts)
    began = time.perf_counter()
    for number, more, stopped_by in decoder.stream(ids, max_tokens=options.max_tokens, batch=options.batch):
        new[number] += more
        stops[number] = stopped_by
        if screen:
            screen.add(number, more, finished=stopped_by is not None)
    seconds = time.perf_counter() - began - decoder.compile_seconds
    continuations = [
        {
            "prompt": text,
            "text": continuation_text(tokenizer, prompt, continuation),
            "prompt_tokens": len(prompt),
            "tokens": len(continuation),
            "stopped_by": stopped_by,
        }
        for text, prompt, continuation, stopped_by in zip(prompts, ids, new, stops, strict=True)
    ]
    tokens = sum(map(len, new))
    return {
        "step": found_step,
        "continuations": continuations,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }
