"""Chat templates: messages as text, and the spans of it that the assistant writes.

A template is a program of unknown origin. It runs in a process with limits (`host/limited.py`), in `templates.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple

from megajax.core.errors import UserError
from megajax.host import limited

Message = Mapping[str, Any]
NO_ARGS: Mapping[str, Any] = MappingProxyType({})

_MOST_MESSAGES = 1000  # in a conversation, which is rendered again after each message
_TOGETHER = 32  # conversations in a call
_SOURCE_CHARACTERS = 1 << 20  # in a template; the longest known ones have some ten thousand
_GIVEN = ("messages", "tools", "add_generation_prompt")  # variables of a template that have their own source


class Chat(NamedTuple):
    """A conversation."""

    messages: Sequence[Message]  # each with `role`, `content` and whatever else the template reads
    place: str  # where it comes from, for error messages
    template_args: Mapping[str, Any] = NO_ARGS  # further variables of the template (see `checked_args`)


class Rendered(NamedTuple):
    """A conversation as text."""

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
        where: str,
        *,
        add_generation_prompt: bool = False,
        template_args: Mapping[str, Any] = NO_ARGS,
    ) -> str:
        """The text of messages, which have `role`, `content` and whatever else the template reads; `where` appears in
        error messages. With `add_generation_prompt` it ends with what precedes the assistant's next words.
        `template_args` (see `checked_args`) are further variables of the template, such as `enable_thinking`."""
        chat = _plain(Chat(messages, where, template_args))
        return self._call("render", chat, add_generation_prompt, what=f"{where}: {self._name}")

    def rendered(
        self,
        chats: Sequence[Chat],
        answers: Sequence[Sequence[int]],
        ends: Sequence[str] = (),
        special: Sequence[str] = (),
    ) -> Iterator[Rendered]:
        """The texts of conversations, and the spans of them that the assistant writes in the messages with the numbers
        `answers`, one list for each conversation.

        The spans are what the template puts between `{% generation %}` and `{% endgeneration %}`; without these, what
        the messages add to their prompts. They do not include white space after one of the texts `ends`, with which
        the assistant ends. Where other messages follow, the last of a turn's tokens, if it is `special`, may be
        another one than at the end.
        """
        for chat in chats:
            if len(chat.messages) > _MOST_MESSAGES:
                raise UserError(f"{chat.place}: {len(chat.messages)} messages; valid: at most {_MOST_MESSAGES}")
        records = [(_plain(chat), list(numbers)) for chat, numbers in zip(chats, answers, strict=True)]
        for start in range(0, len(records), _TOGETHER):
            for text, spans in self._rendered(records[start : start + _TOGETHER], list(ends), list(special)):
                yield Rendered(text, [(first, after) for first, after in spans])

    def _rendered(self, records: list[Any], *texts: list[str]) -> list[Any]:
        (_, place, _), _ = records[0]
        try:
            return self._call("rendered", records, *texts, what=f"{place}: {self._name}")
        except limited.ExceededError:
            if len(records) == 1:
                raise
            return [self._rendered([record], *texts)[0] for record in records]

    def _call(self, function: str, *arguments: Any, what: str) -> Any:
        return limited.call(f"megajax.data.text.templates:{function}", self._template, *arguments, what=what)


def _plain(chat: Chat) -> tuple[list[Message], str, dict[str, Any]]:
    return list(chat.messages), chat.place, dict(chat.template_args)


def checked_args(value: Any, where: str) -> dict[str, Any]:
    """Variables for a template: any by name, except those that it gets anyway. `where` names them in messages."""
    if not isinstance(value, dict):
        valid = 'variables of the chat template, as in {"enable_thinking": false}'
        raise UserError(f"{where} is not an object; valid: {valid}")
    if given := [name for name in _GIVEN if name in value]:
        raise UserError(f"{where}: {given[0]} cannot be given here; valid: other variables of the chat template")
    return value
