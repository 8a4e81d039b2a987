"""`megajax convert import-hf PATH RUN` and `megajax convert export-hf RUN PATH`: models in the Hugging Face format."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from megajax.core.errors import UserError
from megajax.core.options import counted, suggest
from megajax.host import completion
from megajax.host.paths import check_path
from megajax.host.transcript import printable
from megajax.runs.store import run_folder, store_of
from megajax.settings.config import Config
from megajax.settings.flags import Parser
from megajax.start.launch import start


def import_hf(argv: Sequence[str]) -> None:
    """Make a run directory at step 0 from a model in the Hugging Face format."""
    parser = Parser(
        "Create a run directory at step 0 from a model in the Hugging Face format, pretrained or fine-tuned: GPT-2, "
        "Llama, Qwen2, Qwen3 or 3.5, Mistral, Gemma 3, OLMo 3 or hybrid, BERT, or a mixture of experts (Mixtral, "
        "OLMoE, Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE, GPT-OSS, DeepSeek-V2 or V3, Kimi Linear).",
        "megajax convert import-hf PATH RUN [--adapter PATH] [--flag value ...]",
    )
    parser.add_path("path", metavar="PATH", help="folder with config.json and model.safetensors, or a hub name")
    parser.add_path("run", metavar="RUN", help="run directory to create")
    parser.add_path(
        "--adapter", metavar="PATH", help="a LoRA adapter of peft to merge, a folder or a hub name [the one in PATH]"
    )
    parser.add_config_flags("precision", "model.dropout", "model.vocab_multiple", "model.sequence_length")
    args = _parse(parser, argv)
    from megajax.convert.importing import check_new, import_hf, local_folder, open_source, training_flags
    from megajax.runs.ownership import check_outside_runs

    run_dir = run_folder(args.run, "RUN")
    store = store_of(run_dir)
    check_new(run_dir, "RUN")
    check_outside_runs(run_dir, "RUN")
    adapter = local_folder(args.adapter, "--adapter") if args.adapter else None
    source = open_source(local_folder(args.path), parser.overrides(args), adapter)
    _start(source.config)
    if store:
        store.take()
    try:
        import_hf(source, run_dir)
    finally:
        if store:
            store.release()
    model, fresh = source.config.model, list(source.weights.fresh)
    if args.json:
        figures = {"run_dir": args.run, "step": 0, "fresh": fresh, "parameters": _parameters(source.config)}
        figures |= {"precision": source.config.precision}
        print(json.dumps(figures | ({"adapter": str(source.adapter)} if source.adapter else {})))
        return
    if source.adapter:
        print(f"merged the adapter in {source.adapter}")
    if source.added_tokens:
        named = printable(", ".join(source.added_tokens))
        print(f"left out of the tokenizer, because the model has no ids for them: {named}")
    if fresh:
        print(f"not in the safetensors, so initialized randomly: {' and '.join(fresh)}")
    if source.tokenizer is None:
        print("it has no tokenizer: to train on text, add --tokenizer.path")
    sizes = f"{counted(model.num_layers, 'layer')} of {model.hidden_size}, vocabulary {model.vocab_size}"
    flags = training_flags(model, run_dir)
    further = f"; continue training with: megajax train {run_dir / 'config.toml'} {flags}" if flags else ""
    other = "bf16" if source.config.precision == "fp32" else "fp32"
    reason = "as asked" if hasattr(args, "precision") else f"the model's dtype; for another: --precision {other}"
    print(f"precision: {source.config.precision}, {reason}")
    print(f"imported {args.path} into {args.run}: {sizes}{further}")


def export_hf(argv: Sequence[str]) -> None:
    """Write a checkpoint of a run as a folder that transformers loads."""
    parser = Parser(
        "Write a checkpoint as a folder that transformers can load.",
        "megajax convert export-hf RUN PATH [--step N|latest|best] [--dtype fp32|bf16|fp16] [--adapter]",
    )
    parser.add_path("run", metavar="RUN", help="run directory of the model")
    parser.add_path("path", metavar="PATH", help="folder to make")
    parser.add_argument("--step", default="latest", help="a step, latest, or best (lowest validation loss) [latest]")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="dtype of the weights [the one they were imported in, otherwise fp32]",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="only the LoRA adapters, in peft's format [all weights, with the adapters merged]",
    )
    parser.add_weights()
    parser.add_config_flags("plugins")
    args = _parse(parser, argv)
    from megajax.convert.adapters import check_has_adapters, export_adapter
    from megajax.convert.exporting import export_config, export_hf
    from megajax.convert.importing import check_new
    from megajax.runs.ownership import check_outside_runs

    run_dir, folder = run_folder(args.run, "RUN"), Path(args.path)
    check_new(folder, "PATH")
    check_outside_runs(folder, "PATH")
    config = export_config(run_dir, parser.overrides(args))
    if args.adapter:
        check_has_adapters(run_dir, config)
    _start(config)
    if args.adapter:
        step = export_adapter(run_dir, config, folder, args.step, dtype=args.dtype)
        size, what, end = {"rank": config.lora.rank}, "the adapters of ", ""
    else:
        step, tokenizer = export_hf(run_dir, config, folder, args.step, dtype=args.dtype)
        size, what = {"parameters": _parameters(config)}, ""
        end = "" if tokenizer else ", without a tokenizer, since the run has none"
    text = f"exported {what}step {step} of {run_dir} to {folder}{end}"
    print(json.dumps({"path": str(folder), "step": step, **size}) if args.json else printable(text))


ACTIONS: dict[str, Callable[[Sequence[str]], None]] = {"import-hf": import_hf, "export-hf": export_hf}


def main(argv: Sequence[str]) -> None:
    """Run the action named on the command line."""
    if completion.asked():
        parser = Parser("Import a model from the Hugging Face format, or export a run to it.", "megajax convert ACTION")
        parser.add_argument("action", choices=ACTIONS)
        ACTIONS[completion.command(ACTIONS, parser)]([])
    helps = "\n".join(f"  {name:<10} {(action.__doc__ or '').splitlines()[0]}" for name, action in ACTIONS.items())
    if argv and argv[0] in ACTIONS:
        ACTIONS[argv[0]](argv[1:])
    elif argv and argv[0] in ("-h", "--help"):
        print(f"usage: megajax convert ACTION [--flag value ...]\n\n{helps}\n\nACTION --help lists an action's flags")
    else:
        valid = f"valid: {', '.join(ACTIONS)}"
        if not argv:
            raise UserError(f"convert: ACTION missing; {valid}")
        near = suggest(argv[0], ACTIONS, "")
        raise UserError(f"convert {argv[0]}: no such action; {near}{' ' * bool(near)}{valid}")


def _parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    parser.add_argument("--json", action="store_true", help="print a single JSON object")
    args = parser.parse_args(argv)
    check_path(args.path, "PATH")
    return args


def _start(config: Config) -> None:
    """Start JAX on one CPU device, even on a machine with GPUs, because nothing is computed."""
    start(dataclasses.replace(config, simulate_devices=1))


def _parameters(config: Config) -> int:
    from megajax.core.models.staged import count_parameters

    return count_parameters(dataclasses.replace(config.model, vocab_multiple=1))
