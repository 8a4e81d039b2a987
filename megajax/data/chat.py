"""Chat templates: messages as text, and the spans of it that the assistant writes.

A template is a program of unknown origin. It runs in a process with limits (`host/limited.py`), in `templates.py`.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple

from megajax.errors import UserError
from megajax.host import limited

Message = Mapping[str, Any]
NO_ARGS: Mapping[str, Any] = MappingProxyType({})

_MOST_MESSAGES = 1000  # in a conversation, which is rendered again after each message
_SOURCE_CHARACTERS = 1 << 20  # in a template; the longest known ones have some ten thousand
_GIVEN = ("messages", "tools", "add_generation_prompt")  # variables of a template that have their own source


class Conversation(NamedTuple):
    """Messages as one text."""

    text: str
    spans: list[tuple[int, int]]  # the range of characters of each part that the assistant writes


class ChatTemplate:
    """A chat template. `tokens` are special tokens by the names the template uses for them (`bos_token`), `name`
    appears in error messages, and `today` is the date for `strftime_now`."""

    def __init__(self, source: str, tokens: Mapping[str, str], name: str, today: datetime | None = None) -> None:
        if len(source) > _SOURCE_CHARACTERS:
            raise UserError(
                f"the chat template of {name}: {len(source)} characters; valid: at most {_SOURCE_CHARACTERS}"
            )
        self._template = source, dict(tokens), name, today and today.isoformat()
        self._name = f"the chat template of {name}"
        self._call("check", what=self._name)

    def render(
        self,
        messages: Sequence[Message],
        place: str,
        *,
        add_generation_prompt: bool = False,
        template_args: Mapping[str, Any] = NO_ARGS,
    ) -> str:
        """The text of messages, which have `role`, `content` and whatever else the template reads; `place` appears in
        error messages. With `add_generation_prompt` it ends with what precedes the assistant's next words.
        `template_args` (see `checked_args`) are further variables of the template, such as `enable_thinking`."""
        more = dict(template_args), add_generation_prompt
        return self._call("render", list(messages), place, *more, what=f"{place}: {self._name}")

    def conversation(
        self,
        messages: Sequence[Message],
        place: str,
        ends: Sequence[str] = (),
        *,
        answers: Sequence[int] | None = None,
        template_args: Mapping[str, Any] = NO_ARGS,
    ) -> Conversation:
        """The text of messages, and the spans of it that the assistant writes in the messages with the numbers
        `answers` (None: in all).

        The spans are what the template puts between `{% generation %}` and `{% endgeneration %}`; without these, what
        the messages add to their prompts. They do not include white space after one of the texts `ends`, with which
        the assistant ends.
        """
        if len(messages) > _MOST_MESSAGES:
            raise UserError(f"{place}: {len(messages)} messages; valid: at most {_MOST_MESSAGES}")
        if answers is None:
            answers = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        more = dict(template_args), list(ends), list(answers)
        text, spans = self._call("conversation", list(messages), place, *more, what=f"{place}: {self._name}")
        return Conversation(text, [(start, stop) for start, stop in spans])

    def _call(self, function: str, *arguments: Any, what: str) -> Any:
        return limited.call(f"megajax.data.templates:{function}", self._template, *arguments, what=what)


def checked_args(value: Any, place: str) -> dict[str, Any]:
    """Variables for a template: any by name, except those that it gets anyway. `place` names them in messages."""
    if not isinstance(value, dict):
        valid = 'variables of the chat template, as in {"enable_thinking": false}'
        raise UserError(f"{place} is not an object; valid: {valid}")
    if given := [name for name in _GIVEN if name in value]:
        raise UserError(f"{place}: {given[0]} is not for the user; valid: other variables of the chat template")
    return value
