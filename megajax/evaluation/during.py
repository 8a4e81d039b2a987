"""Tasks of `megajax eval` during training (`--evaluate`); their files are read before the first step."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megajax.core.errors import UserError
from megajax.core.program.program import Program
from megajax.data.samples.gpt import EvaluationSamples
from megajax.data.text.tokenizer import Tokenizer
from megajax.evaluation.options import PAPER_OVERLAP
from megajax.evaluation.pretrained import last_word_figures, read_lambada, read_wikitext
from megajax.evaluation.scoring import perplexities, score_continuations
from megajax.settings.config import Config

Evaluation = Callable[..., dict[str, float]]  # (program, params, between=) -> figures; see `scoring.score_samples`


def read_tasks(config: Config, tokenizer: Tokenizer | None) -> dict[str, Evaluation]:
    """A function that evaluates each `--evaluate` task with a file, by the task's name."""
    evaluations: dict[str, Evaluation] = {}
    for entry in config.evaluate if config.pretrains else ():
        name, _, path = entry.partition("=")
        flag = f"--evaluate {name}="
        if tokenizer is None:
            raise UserError(f"{flag}{path}: the run has no tokenizer, which text needs; valid: without --evaluate")
        if name == "lambada":
            evaluations[name] = partial(_lambada, read_lambada(path, tokenizer, flag))
        else:
            words, text = read_wikitext(path, tokenizer, flag)
            length = config.model.sequence_length
            samples = EvaluationSamples(text, sequence_length=length, overlap=min(PAPER_OVERLAP, length))
            evaluations[name] = partial(_wikitext, words, samples)
    return evaluations


def _lambada(
    passages: Sequence[tuple[list[int], int]], program: Program, params: Any, between: Callable[[], None]
) -> dict[str, float]:
    return last_word_figures(score_continuations(program, params, passages, between=between))


def _wikitext(
    words: int, samples: EvaluationSamples, program: Program, params: Any, between: Callable[[], None]
) -> dict[str, float]:
    (result,) = perplexities(program, params, samples, between=between).values()
    return {"perplexity": result.per(words), "loss": result.total_loss / words}
