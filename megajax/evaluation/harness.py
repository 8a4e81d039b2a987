"""A trained model in EleutherAI's `lm-eval` harness (extra `eval`), under the name `megajax`.

    import lm_eval
    import megajax.evaluation.harness
    lm_eval.simple_evaluate(model="megajax", model_args="checkpoint=runs/demo,mesh.tensor=2", tasks=["lambada_openai"])

or `simple_evaluate(model=MegajaxLM("runs/demo"), ...)`. Every process of a run makes the same calls.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401  # the harness looks for its own models only as long as none is registered
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from megajax.core.errors import UserError
from megajax.core.program.program import Program
from megajax.data.tasks.instructions import chat_template
from megajax.data.text.chat import NO_ARGS, ChatTemplate
from megajax.evaluation.scoring import score_continuations
from megajax.generation.choice import Sampling
from megajax.generation.decoder import Decoder
from megajax.generation.generate_options import GenerateOptions
from megajax.generation.generate_options import template_args as read_template_args
from megajax.generation.text import Stops
from megajax.generation.window import continue_in_windows, one_row
from megajax.runs.trained import TrainedModel, evaluation_config, run_tokenizer
from megajax.settings.option_errors import check

_SETTINGS = ("top_k", "top_p", "min_p", "repetition_penalty")  # of generation, like the flags of `megajax generate`


@register_model("megajax")
class MegajaxLM(TemplateLM):
    """A run's model. Contexts and continuations are encoded, and long texts truncated, as for the harness's own models.

    Args:
        checkpoint: the run directory of a training.
        step: a step, latest, or best.
        batch_size: rows per device and microbatch; 0: as in training.
        template_args: further variables of the chat template, or a JSON object with them, for `apply_chat_template`.
        config: values of the configuration by key, like the flags of `eval.py`: `mesh.tensor`, `simulate_devices`.
    """

    def __init__(
        self,
        checkpoint: str,
        step: str | int = "latest",
        batch_size: int = 0,
        template_args: Mapping[str, Any] | str = NO_ARGS,
        **config: Any,
    ) -> None:
        super().__init__()
        text = template_args if isinstance(template_args, str) else json.dumps(dict(template_args))
        self._template_args, self._name = read_template_args(text, "template_args"), checkpoint
        run_dir = Path(checkpoint)
        if batch_size:
            config["train.microbatch"] = batch_size
        resolved = evaluation_config(run_dir, config)
        self._text = run_tokenizer(run_dir, resolved)
        self._trained = TrainedModel.restore(run_dir, resolved, str(step))

    @property
    def eot_token_id(self) -> int:
        """Id of the end of text."""
        return self._text.end_of_text

    @property
    def prefix_token_id(self) -> int:
        """The context for a text without one: the tokenizer's begin token, or else the end of text."""
        return self._text.begin[-1] if self._text.begin else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's cache of requests."""
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the chat template, which the harness records; a tokenizer here has one at most."""
        if isinstance(chat_template, str):
            raise UserError(f"apply_chat_template {chat_template!r}; valid: true, for the tokenizer's own")
        return self._text.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, which the assistant's next turn follows, or which ends within its last turn."""
        template = self._template
        if template is None:
            raise UserError(f"apply_chat_template: {self._name} has no chat template; valid: without it")
        text = template.render(
            chat_history,
            "apply_chat_template",
            add_generation_prompt=add_generation_prompt,
            template_args=self._template_args,
        )
        last = chat_history[-1]["content"]
        last = last if last in text else last.strip()  # which templates may do
        return text if add_generation_prompt else text[: text.rindex(last) + len(last)]

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return chat_template(self._text)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, after the tokenizer's begin token unless the text spells it out or it is not wanted."""
        ids = self._text.encode(string)
        return ids if add_special_tokens is False else self._text.with_begin(ids)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both, from their common text; if a token spans the two and none is left, from each one's own."""
        context_ids, ids = super()._encode_pair(context, continuation)
        return context_ids, ids or self._text.encode_continuations([continuation])[0]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        for (context, continuation), _, ids in requests:
            if not ids:  # it would be certain, and win against all others
                problem = f"{continuation!r} after {context[-40:]!r} has no tokens to score"
                raise UserError(f"loglikelihood: {problem}; valid: continuations with a text")
        sequences = [(context + continuation, len(context)) for _, context, continuation in requests]
        scores = score_continuations(self._trained.program, self._trained.params, sequences)
        return [(score.log_probability, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of texts without a context."""
        texts = [[self.prefix_token_id, *self.tok_encode(request.args[0])] for request in requests]
        scores = score_continuations(self._trained.program, self._trained.params, [(ids, 1) for ids in texts])
        return [score.log_probability for score in scores]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations of texts, each up to the first of its stop texts."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, wanted: dict[str, Any]) -> str:
        settings = {name: value for name, value in normalize_gen_kwargs(wanted).items() if value is not None}
        stops = handle_stop_sequences(settings.pop("until", None), eos=self._text.decode([self.eot_token_id]))
        limit, known = settings.pop("max_gen_toks"), ("temperature", *_SETTINGS)
        sampling = {"temperature": 0.0} | {name: settings.pop(name) for name in known if name in settings}
        settings.pop("do_sample", None)
        if settings.get("num_beams") == 1:
            del settings["num_beams"]
        if settings:
            valid = f"until, max_gen_toks, do_sample, {', '.join(known)}"
            raise UserError(f"generation with {', '.join(settings)}; valid: {valid}")
        options = GenerateOptions(**sampling, seed=self._trained.program.config.seed)
        check(options)
        prompt, ids = self._text.encode_prompt(context), list[int]()
        stopped = Stops(self._text, [prompt], [stop for stop in stops if stop])
        for new in self._continued(prompt, limit, Sampling.of(options)):
            count = stopped(0, new)
            ids += new[:count]
            if count is not None:
                break
        return postprocess_generated_text(self._text.decode(ids), stops, None)

    def _continued(self, prompt: list[int], limit: int, sampling: Sampling) -> Iterator[list[int]]:
        """Up to `limit` new ids, in pieces: with a KV cache, or without one on a mesh with a pipe."""
        trained, ends = self._trained, self._text.ends
        config, length = trained.program.config, trained.program.config.model.sequence_length
        if limit < length:
            prompt = prompt[limit - length :]  # so that everything fits in the context
            if config.mesh.pipe == 1 and config.optimizer.zero != 3:
                for piece in self._decoder(sampling).stream([prompt], max_tokens=limit, batch=1):
                    yield piece.ids
                return
        for new in continue_in_windows(
            self._sampler, trained.params, prompt, num_tokens=limit, sampling=sampling, ends=ends
        ):
            yield [new]

    @lru_cache(maxsize=1)  # noqa: B019  # one model lives as long as its caller
    def _decoder(self, sampling: Sampling) -> Decoder:
        return Decoder(self._trained.program, self._trained.params, sampling, self._text.ends)

    @cached_property
    def _sampler(self) -> Program:
        return one_row(self._trained.program)
