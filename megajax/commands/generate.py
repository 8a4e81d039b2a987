"""`megajax generate`: continue prompts with a run's model."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import MISSING
from functools import partial
from typing import Any

from megajax.core.errors import UserError
from megajax.core.options import Option
from megajax.core.traits import IS_PATH
from megajax.generation.generate_options import GenerateOptions, template_args
from megajax.runs.store import run_folder
from megajax.settings.config import Config
from megajax.settings.flags import Parser, add_flag
from megajax.start.launch import check_mesh_of_flags

CONFIG_FLAGS = ("mesh", "distributed", "simulate_devices", "precision", "compilation_cache", "compilation_cache_size")


def main(argv: Sequence[str]) -> None:
    """Restore the checkpoint given on the command line, and print continuations while they are generated."""
    parser = Parser(
        "Generate text with a trained model.",
        "megajax generate --checkpoint RUN --prompt TEXT [--prompt TEXT ...] | --prompt-file FILE | --interactive "
        "[--chat] [--flag value ...]",
    )
    checkpoint = Option("checkpoint", str, MISSING, "run directory of the model", traits=(IS_PATH,))
    add_flag(parser, checkpoint, required=True)
    parser.add_weights()
    parser.add_argument("--step", default="latest", help="a step, latest, or best (lowest validation loss) [latest]")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="text to continue; repeatable")
    parser.add_path("--prompt-file", default="", metavar="FILE", help="text file with one prompt per line")
    chat = "apply the tokenizer's chat template: each prompt is a user turn, and FILE holds JSON lines of messages"
    parser.add_argument("--chat", action="store_true", help=chat)
    parser.add_argument(
        "--interactive", action="store_true", help="chat in the terminal; your turns are read from standard input"
    )
    further = 'further variables of the chat template as JSON, such as {"enable_thinking": false}'
    add_flag(parser, Option("template_args", str, "", further))
    parser.add_config_flags(owner=GenerateOptions)
    parser.add_argument("--json", action="store_true", help="print a single JSON object")
    parser.add_config_flags(*CONFIG_FLAGS, "plugins")
    args = parser.parse_args(argv)
    options = GenerateOptions(**parser.overrides(args, GenerateOptions))
    overrides = parser.overrides(args, Config)
    check_mesh_of_flags(overrides)
    if overrides.get("mesh.pipe", 1) != 1:
        raise UserError(f"--mesh.pipe {overrides['mesh.pipe']}: generation has no pipeline; valid: --mesh.pipe 1")

    from megajax.generation.writer import Writer
    from megajax.host.processes import is_first_process

    prompts = _prompts(args)
    if options.logprobs and not args.json:
        raise UserError("--logprobs without --json; valid: with --json, which prints them")
    chat = args.chat or args.interactive
    variables = template_args(getattr(args, "template_args", ""), "--template-args")
    if variables and not chat:
        raise UserError("--template-args without --chat; valid: with --chat or --interactive")
    run_dir = run_folder(args.checkpoint, "--checkpoint")
    writer = Writer(run_dir, args.step, options, overrides, chat=chat, template_args=variables)
    if args.interactive:
        writer.talk()
        return
    report = writer.answer(prompts, show=not args.json)
    if is_first_process():
        if args.json:
            print(json.dumps(report))
        else:
            note = partial(print, file=sys.stderr)  # standard output has only the texts
            for number, found in enumerate(report["continuations"], start=1):
                if found["stopped_by"] == "context":
                    note(f"prompt {number} stopped at the context limit after {found['tokens']} tokens")
            note(f"{report['tokens']} tokens, {report['tokens_per_second']:.1f} tokens/s")


def _prompts(args: argparse.Namespace) -> list[Any]:
    """The texts to continue, or the conversations with `--chat`; none with `--interactive`."""
    from megajax.data.tasks.instructions import conversation
    from megajax.data.text.chat import Chat
    from megajax.generation.text import read_prompts

    if args.interactive:
        for name in ("prompt", "prompt_file", "json", "logprobs"):
            if getattr(args, name, False):
                raise UserError(f"--interactive with --{name.replace('_', '-')}; valid: one of them")
        return []
    texts = read_prompts(args.prompt, args.prompt_file)
    if not args.chat:
        return texts
    if args.prompt:
        return [Chat([{"role": "user", "content": text}], "--prompt") for text in texts]
    place = f"--prompt-file {args.prompt_file}: conversation"
    return [conversation(text, f"{place} {number}") for number, text in enumerate(texts, start=1)]
