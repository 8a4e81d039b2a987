"""The tasks of `megajax eval` that need no fine-tuning, as in the Megatron paper (§5.3): each restores a run's
checkpoint on the requested mesh and returns figures by name."""

import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.core.models.registry import FAMILIES
from megajax.core.program.program import Program
from megajax.data.samples.base import CorpusSamples
from megajax.data.samples.gpt import EvaluationSamples
from megajax.data.text.indexed import prepared_prefix
from megajax.data.text.records import TextDocuments
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokens import TokenDocuments
from megajax.evaluation.options import PAPER_OVERLAP
from megajax.evaluation.scoring import Continuation, Perplexity, perplexities, score_continuations, total_loss
from megajax.runs.data import given_samples, has_run_data, open_run_data
from megajax.runs.trained import TrainedModel, evaluation_config, run_tokenizer
from megajax.settings.config import Config

# WikiText-103 is split into words, with spaces around punctuation. Replacements that undo this, in this order:
_WORDS = [("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")]
_MARKS = [(f" {mark} ", f"{mark} ") for mark in ":;.!?,"]
_PAIRS = [("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'")]  # no spaces just inside
_REST = [("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°")]
_REST += [(" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")]


def evaluate_perplexity(
    run_dir: Path, *, step: str, data: str, overrides: dict[str, Any], overlap: int | None = None
) -> dict[str, Any]:
    """Loss per token and perplexity on the run's validation split, or on any text file, folder or tokenized dataset.

    For a language model, `bits_per_byte` is the loss of all predicted tokens in bits, divided by the UTF-8 bytes of the
    text; None for a tokenized dataset in `data`, or without a byte-level tokenizer. A model with several losses has
    figures for each by name, and `loss` is their sum.
    """
    config = evaluation_config(run_dir, overrides, any_model=True)
    if config.model.head != "pretraining":
        name = config.task.name if not config.pretrains else "its task"
        raise UserError(f"--checkpoint {run_dir}: a run of {name} has no perplexity; valid: megajax eval {name}")
    length = config.model.sequence_length
    language_model = FAMILIES[config.model.family].continues_text
    if overlap is not None and not language_model:
        raise UserError(f"--overlap: {config.model.family} has no windows of text; valid: without it")
    overlap = _advance(overlap, length, default=length)
    samples, tokenizer = (
        _given_samples(data, run_dir, config, overlap) if data else _validation_samples(run_dir, config, overlap)
    )
    trained = TrainedModel.restore(run_dir, config, step)
    figures = perplexity_figures(trained.program, trained.params, samples, tokenizer)
    return {"task": "perplexity", "step": trained.step} | figures


def perplexity_figures(
    program: Program, params: Any, samples: CorpusSamples, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The figures of `evaluate_perplexity`; `tokenizer` is None if the text was given tokenized."""
    losses = perplexities(program, params, samples)
    if not FAMILIES[program.config.model.family].continues_text:
        figures: dict[str, Any] = {"loss": total_loss(losses)}
        for name, found in losses.items():
            figures |= {f"{name}_loss": found.loss, f"{name}_perplexity": found.perplexity}
            figures |= {f"{name}_accuracy": found.accuracy, f"{name}_targets": found.tokens}
        return figures
    (result,) = losses.values()
    bits_per_byte = None
    if tokenizer:
        sizes = [tokenizer.num_bytes(document) for document in samples.documents()]
        num_bytes = sum(size for size in sizes if size is not None)
        bits_per_byte = result.total_loss / math.log(2) / num_bytes if num_bytes else None
    figures = {"loss": result.loss, "perplexity": result.perplexity, "tokens": result.tokens}
    return figures | {"bits_per_byte": bits_per_byte}


def evaluate_wikitext103(
    run_dir: Path, *, step: str, data: str, overrides: dict[str, Any], overlap: int | None = None
) -> dict[str, Any]:
    """The paper's perplexity per word of the original text, over windows that advance by `overlap` targets.

    Figures: `T_o` words of the original, `T` predicted subwords, `loss` per word in nats, and `tokens_per_second`, the
    predicted subwords per second without the time to compile.
    """
    config = evaluation_config(run_dir, overrides)
    length = config.model.sequence_length
    overlap = _advance(overlap, length, default=min(PAPER_OVERLAP, length))
    words, text = read_wikitext(data, run_tokenizer(run_dir, config))
    samples = EvaluationSamples(text, sequence_length=length, overlap=overlap)
    trained = TrainedModel.restore(run_dir, config, step)
    perplexities(trained.program, trained.params, samples, batches=1)  # compiles
    began = time.perf_counter()
    (result,) = perplexities(trained.program, trained.params, samples).values()
    seconds = time.perf_counter() - began
    return {
        "task": "wikitext103",
        "step": trained.step,
        "perplexity": result.per(words),
        "loss": result.total_loss / words,
        "T_o": words,
        "T": result.tokens,
        "windows": len(samples),
        "overlap": overlap,
        "tokens_per_second": result.tokens / seconds,
    }


def evaluate_lambada(run_dir: Path, *, step: str, data: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Accuracy and perplexity of the last words of passages; `several_subwords` counts words of more than one."""
    config = evaluation_config(run_dir, overrides)
    passages = read_lambada(data, run_tokenizer(run_dir, config))
    trained = TrainedModel.restore(run_dir, config, step)
    figures = last_word_figures(score_continuations(trained.program, trained.params, passages))
    several = sum(len(ids) - first > 1 for ids, first in passages)
    return {"task": "lambada", "step": trained.step, **figures, "passages": len(passages), "several_subwords": several}


def read_wikitext(path: str, tokenizer: Tokenizer, flag: str = "--data ") -> tuple[int, TokenDocuments]:
    """For `wiki.test.tokens` or another text in its format: the number of words and punctuation marks (the paper's
    T_o), and the subwords of the text without its word tokenization, as one document."""
    refusal = UserError(f"{flag}{path!r}; valid: one file of plain text, such as wiki.test.tokens")
    if Path(path).is_dir() or Path(path).suffix.lower() == ".jsonl":  # "" is the current folder
        raise refusal
    text, *more = itertools.islice(TextDocuments(path, cut=False, flag=flag.rstrip()), 2)
    if more:
        raise refusal
    ids = np.array(tokenizer.with_begin(tokenizer.encode(detokenize(text))), np.int32)
    return len(text.strip().split(" ")), TokenDocuments.from_sequences([[ids]], path)


def detokenize(text: str) -> str:
    """The original text, without the spaces that the corpus puts around punctuation."""
    for spaced, plain in (*_WORDS, *_MARKS):
        text = text.replace(spaced, plain)
    for opening, closing in _PAIRS:
        inner = rf"\s*([^{re.escape(closing)}]*?)\s*"
        text = re.sub(re.escape(opening) + inner + re.escape(closing), rf"{opening}\1{closing}", text)
    for spaced, plain in _REST:
        text = text.replace(spaced, plain)
    return text


def read_lambada(path: str, tokenizer: Tokenizer, flag: str = "--data ") -> list[tuple[list[int], int]]:
    """Ids of every passage and the index at which its last word begins, for `score_continuations`. That word follows
    the last white space, and is encoded with a space before it."""
    if Path(path).suffix.lower() != ".jsonl":
        raise UserError(f"{flag}{path!r}; valid: a .jsonl file of passages, such as lambada_test.jsonl")
    contexts, words = [], []
    for where, text in TextDocuments(path, flag=flag.rstrip()).placed():
        context, word = split_last_word(text)
        if not context:
            raise UserError(f"{flag}{where}: the passage is a single word; valid: text before a last word")
        contexts.append(context)
        words.append(" " + word)
    before = [tokenizer.with_begin(context) for context in tokenizer.encode_batch(contexts)]
    pairs = zip(before, tokenizer.encode_continuations(words), strict=True)
    return [(context + word, len(context)) for context, word in pairs]


def split_last_word(text: str) -> tuple[str, str]:
    """The text before the last word, without the white space between them, and the last word."""
    word = text.split()[-1]
    return text.rstrip().removesuffix(word).rstrip(), word


def last_word_figures(words: Sequence[Continuation]) -> dict[str, float]:
    """For one or more last words: `accuracy`, the share of words whose every subword is the most probable one; `loss`,
    the mean cross-entropy of a word in nats; and `perplexity` per word."""
    loss = -math.fsum(word.log_probability for word in words)
    found = Perplexity(loss, len(words), sum(word.greedy for word in words))
    return {"accuracy": found.accuracy, "perplexity": found.perplexity, "loss": found.loss}


def _given_samples(data: str, run_dir: Path, config: Config, overlap: int) -> tuple[CorpusSamples, Tokenizer | None]:
    """The samples of a text or tokenized dataset; for a text also the run's tokenizer."""
    tokenized = prepared_prefix(data, flag="--data") is not None
    needed = not (tokenized and FAMILIES[config.model.family].continues_text)
    tokenizer = run_tokenizer(run_dir, config) if needed else None
    return given_samples(config, data, tokenizer, overlap), None if tokenized else tokenizer


def _validation_samples(run_dir: Path, config: Config, overlap: int) -> tuple[CorpusSamples, Tokenizer | None]:
    """The run's validation split, and the tokenizer that encoded its text."""
    if not has_run_data(config, run_dir / "data"):
        raise UserError(
            f"--data missing: {run_dir} has no corpus yet, or one of Python code, so no validation split; valid: a "
            "text file, a folder, or a tokenized dataset"
        )
    data = open_run_data(config, run_dir / "data", overlap)
    if data.validation is None:
        raise UserError(
            f"--data missing: {run_dir} has no validation split (--data.validation-fraction 0); "
            "valid: a text file, a folder, or a tokenized dataset"
        )
    return data.validation, data.tokenizer


def _advance(overlap: int | None, length: int, default: int) -> int:
    if overlap is None:
        return default
    if not 1 <= overlap <= length:
        raise UserError(f"--overlap {overlap}; valid: 1 to {length}, the tokens of a sequence")
    return overlap


EVALUATIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "lambada": evaluate_lambada,
    "perplexity": evaluate_perplexity,
    "wikitext103": evaluate_wikitext103,
}
"""Keyed by the names in `options.PRETRAINED`."""
