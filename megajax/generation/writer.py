"""Continue prompts with a run's model: texts, or conversations, which its chat template turns into text."""

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from megajax.core.errors import UserError
from megajax.data.tasks.instructions import chat_template
from megajax.data.text.chat import NO_ARGS, Chat, Message
from megajax.generation.choice import Sampling
from megajax.generation.decoder import Decoder
from megajax.generation.generate_options import GenerateOptions
from megajax.generation.text import Screen, Stops, continuation_text
from megajax.host.processes import is_first_process
from megajax.runs.trained import TrainedModel, evaluation_config, run_tokenizer

_OF_TRAINING = {"optimizer.zero": 1, "sequence_parallel": False, "train.microbatch": 1}


class Writer:
    """Continues prompts. The weights are restored before the first answer, after prompts are checked. `overrides`
    replace values in the run's configuration. With `chat` the run's tokenizer must have a chat template, which
    gets `template_args`."""

    def __init__(
        self,
        run_dir: Path,
        step: str,
        options: GenerateOptions,
        overrides: Mapping[str, Any],
        *,
        chat: bool,
        template_args: Mapping[str, Any] = NO_ARGS,
    ) -> None:
        self._run_dir, self._step, self._options, self._template_args = run_dir, step, options, template_args
        self._config = evaluation_config(run_dir, {**overrides, **_OF_TRAINING})
        self._tokenizer = run_tokenizer(run_dir, self._config)
        self._template = chat_template(self._tokenizer) if chat else None
        if chat and self._template is None:
            raise UserError(
                f"--chat: the tokenizer of {run_dir} has no chat template; valid: without --chat, for a model "
                'trained on "prompt" and "completion"'
            )
        self._decoder: Decoder | None = None
        self._found_step = 0

    def answer(self, prompts: Sequence[str | Chat], *, show: bool) -> dict[str, Any]:
        """The report for `--json`; with `show` the texts are also printed as they come, without the prompt if that is a
        conversation."""
        ids = [self._ids(prompt, f"prompt {number}") for number, prompt in enumerate(prompts, start=1)]
        decoder, options = self._restored(), self._options
        starts = [prompt if isinstance(prompt, str) else "" for prompt in prompts]
        screen = Screen(self._tokenizer, starts, ids, options.stop) if show and is_first_process() else None
        new: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        stops: list[str | None] = [None] * len(prompts)
        began, compiled = time.perf_counter(), decoder.compile_seconds
        ends = Stops(self._tokenizer, ids, options.stop)
        pieces = decoder.stream(ids, max_tokens=options.max_tokens, batch=options.batch, stops=ends)
        for index, more, stopped_by, of_more in pieces:
            new[index] += more
            logprobs[index] += of_more
            stops[index] = stopped_by
            if screen:
                screen.add(index, more, finished=stopped_by is not None)
        seconds = time.perf_counter() - began - (decoder.compile_seconds - compiled)
        continuations = [
            {
                **({"prompt": original} if isinstance(original, str) else {"messages": original.messages}),
                "text": continuation_text(self._tokenizer, prompt, continuation, options.stop),
                "prompt_tokens": len(prompt),
                "tokens": len(continuation),
                "stopped_by": stopped_by,
                **({"ids": continuation, "logprobs": of_ids} if options.logprobs else {}),
            }
            for original, prompt, continuation, stopped_by, of_ids in zip(
                prompts, ids, new, stops, logprobs, strict=True
            )
        ]
        tokens = sum(map(len, new))
        return {
            "step": self._found_step,
            "continuations": continuations,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
        }

    def talk(self) -> None:
        """A conversation: every line of standard input is a user turn, which is answered."""
        if jax.process_count() > 1:
            raise UserError("--interactive with several processes; valid: one process")
        note = partial(print, end="", flush=True, file=sys.stderr)  # standard output has only the answers
        messages: list[Message] = []
        while True:
            note("> " if sys.stdin.isatty() else "")
            try:
                line = sys.stdin.readline()
                line.encode()  # without a locale, unknown bytes are halves of characters
            except UnicodeError:
                raise UserError("standard input is not UTF-8; valid: text in UTF-8") from None
            if not line:
                return
            if line.strip():
                messages.append({"role": "user", "content": line.strip()})
                (found,) = self.answer([Chat(messages, "standard input")], show=True)["continuations"]
                messages.append({"role": "assistant", "content": found["text"]})

    def _ids(self, prompt: str | Chat, name: str) -> list[int]:
        if isinstance(prompt, str):
            ids = self._tokenizer.encode_prompt(prompt)
        else:
            assert self._template is not None
            args = {**self._template_args, **prompt.template_args}
            text = self._template.render(prompt.messages, name, add_generation_prompt=True, template_args=args)
            ids = self._tokenizer.encode(text) or [self._tokenizer.end_of_text]
        length = self._config.model.sequence_length
        if len(ids) > length:
            raise UserError(f"{name} has {len(ids)} tokens; valid: at most {length}, the context of {self._run_dir}")
        return ids

    def _restored(self) -> Decoder:
        if self._decoder is None:
            trained = TrainedModel.restore(self._run_dir, self._config, self._step)
            # The decoder stores the weights in another form, and for passes of whole texts in this one, too.
            sampling = Sampling.of(self._options)
            self._decoder = Decoder(
                trained.program, trained.params, sampling, self._tokenizer.ends, logprobs=self._options.logprobs
            )
            self._found_step = trained.step
        return self._decoder
