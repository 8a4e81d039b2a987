"""Render messages with a tokenizer's chat template, as `transformers` does, and find the spans the assistant writes.

A template is a program. It runs in Jinja's sandbox, and the size of its output is limited, but its time is not.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, ext, nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from megajax.errors import UserError

Message = Mapping[str, Any]
NO_ARGS: Mapping[str, Any] = MappingProxyType({})

_MOST_CHARACTERS = 1 << 24  # in a rendered text
_MOST_MESSAGES = 1000  # in a conversation, which is rendered again after each message
_SOURCE_CHARACTERS = 1 << 20  # in a template; the longest known ones have some ten thousand
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning; templates use the first
_GIVEN = ("messages", "tools", "add_generation_prompt")  # variables of a template that have their own source
_LONG_NUMBER = re.compile(r"\d{5,}")
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Conversation(NamedTuple):
    """Messages as one text."""

    text: str
    spans: list[tuple[int, int]]  # the range of characters of each part that the assistant writes


class ChatTemplate:
    """A compiled chat template. `tokens` are special tokens by the names the template uses for them (`bos_token`),
    `name` appears in error messages, and `today` is the date for `strftime_now`."""

    def __init__(self, source: str, tokens: Mapping[str, str], name: str, today: datetime | None = None) -> None:
        if len(source) > _SOURCE_CHARACTERS:
            raise UserError(
                f"the chat template of {name}: {len(source)} characters; valid: at most {_SOURCE_CHARACTERS}"
            )
        self._tokens, self._name, self._marked = dict(tokens), name, bool(_MARKED.search(source))
        self._environment = _Sandbox(today)
        try:
            self._template = self._environment.from_string(source)
        except (TemplateError, RecursionError, MemoryError, ValueError, OverflowError, SyntaxError) as error:
            at = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise UserError(f"the chat template of {name}: {at}{_reason(error)}; valid: a template in Jinja") from None

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
        return self._render(messages, place, add_generation_prompt, template_args)[0]

    def conversation(
        self,
        messages: Sequence[Message],
        place: str,
        ends: Sequence[str] = (),
        *,
        template_args: Mapping[str, Any] = NO_ARGS,
    ) -> Conversation:
        """The text of messages, and the spans of it that the assistant writes.

        The spans are what the template puts between `{% generation %}` and `{% endgeneration %}`; without these, what
        every message with the role `assistant` adds to its prompt. They do not include white space after one of the
        texts `ends`, with which the assistant ends.
        """
        if len(messages) > _MOST_MESSAGES:
            raise UserError(f"{place}: {len(messages)} messages; valid: at most {_MOST_MESSAGES}")
        text, spans = self._render(messages, place, False, template_args)
        if not self._marked:
            spans = [
                self._turn(text, messages, number, place, template_args)
                for number, message in enumerate(messages)
                if message.get("role") == "assistant"
            ]
        return Conversation(text, [(start, _without_space(text, start, stop, ends)) for start, stop in spans])

    def _turn(
        self, text: str, messages: Sequence[Message], number: int, place: str, args: Mapping[str, Any]
    ) -> tuple[int, int]:
        before = self.render(messages[:number], place, add_generation_prompt=True, template_args=args)
        after = self.render(messages[: number + 1], place, template_args=args) if number + 1 < len(messages) else text
        if not (after.startswith(before) and text.startswith(after)):
            raise UserError(
                f"{place}: {self._name} renders the text before message {number + 1} differently when more follows, so "
                "the assistant's part is unknown; valid: a template with {% generation %}, or fewer turns"
            )
        return len(before), len(after)

    def _render(
        self, messages: Sequence[Message], place: str, add_generation_prompt: bool, template_args: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        blocks: list[str] = []
        generated: list[tuple[int, str]] = []
        size = 0
        self._environment.blocks, self._environment.generated = blocks, generated
        try:
            for block in self._template.generate(
                messages=[_plain(message) for message in messages],
                **{"tools": None, "documents": None, **self._tokens, **template_args},
                add_generation_prompt=add_generation_prompt,
            ):
                blocks.append(block)
                size += len(block)
                if size > _MOST_CHARACTERS:
                    raise TemplateError(f"more than {_MOST_CHARACTERS} characters")
        except Exception as error:  # templates can fail in any way
            raise UserError(
                f"{place}: the chat template of {self._name} cannot render it: {_reason(error)}; valid: "
                "messages that the template accepts"
            ) from None
        text = "".join(blocks)
        for start, part in generated:
            if not text.startswith(part, start):
                raise UserError(
                    f"{self._name}: its {{% generation %}} is inside a macro or filter; valid: outside of both"
                )
        return text, [(start, start + len(part)) for start, part in generated]


def checked_args(value: Any, place: str) -> dict[str, Any]:
    """Variables for a template: any by name, except those that it gets anyway. `place` names them in messages."""
    if not isinstance(value, dict):
        valid = 'variables of the chat template, as in {"enable_thinking": false}'
        raise UserError(f"{place} is not an object; valid: {valid}")
    if given := [name for name in _GIVEN if name in value]:
        raise UserError(f"{place}: {given[0]} is not for the user; valid: other variables of the chat template")
    return value


def _plain(message: Message) -> dict[str, Any]:
    """A message as `transformers` passes it to templates: without None values, and with reasoning under all names."""
    found = {key: value for key, value in message.items() if value is not None}
    thought = next((found[name] for name in _REASONING if name in found), None)
    return found if thought is None else {"thinking": thought, **found, "reasoning_content": thought}


def _without_space(text: str, start: int, stop: int, ends: Sequence[str]) -> int:
    """The end of a span, excluding white space after one of its `ends`."""
    part = text[start:stop].rstrip()
    return start + len(part) if part.endswith(tuple(ends)) else stop


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox for templates: everything that `transformers` provides, but no operation with a too large result."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self, today: datetime | None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise_exception, "dict": _Dict(), "namespace": _Namespace}
        self.globals["strftime_now"] = lambda form: (today or datetime.now()).strftime(form)
        self.blocks: list[str] = []  # the text rendered so far
        self.generated: list[tuple[int, str]] = []  # start and text of each `{% generation %}` block

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Evaluate `*`, `**` or `%` (which also formats texts), unless the result would be too large."""
        both = left, right
        if operator == "*" and any(isinstance(value, list | tuple) for value in both):
            raise TemplateError("a product of lists")
        sizes = [len(value) if isinstance(value, str) else abs(value) for value in both if isinstance(value, str | int)]
        if operator == "*" and any(isinstance(value, str) for value in both):
            too_large = math.prod(sizes) > _MOST_CHARACTERS
        elif operator == "%" and isinstance(left, str):
            too_large = "*" in left or any(int(digits) > _MOST_CHARACTERS for digits in _LONG_NUMBER.findall(left))
        else:
            too_large = operator == "**" and any(size > 1000 for size in sizes)
        if too_large:
            raise TemplateError(f"{operator} makes more than {_MOST_CHARACTERS} characters")
        return super().call_binop(context, operator, left, right)


class _Generation(ext.Extension):
    """The tag `{% generation %}`."""

    tags = {"generation"}  # noqa: RUF012  # declared like in the base class

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body, lineno=line)

    def _note(self, caller: Any) -> str:
        assert isinstance(self.environment, _Sandbox)
        text: str = caller()
        self.environment.generated.append((sum(map(len, self.environment.blocks)), text))
        return text


class _Dict:
    """`dict` inside templates."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` inside templates; refuses names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the name {name[:40]!r} in a namespace")


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
