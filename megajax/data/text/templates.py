"""Render messages with a chat template, as `transformers` does, and find the spans the assistant writes.

The functions are called by `chat.py` in a process with limits of memory and time. Their first argument is the template:
its source, special tokens by name, its name in error messages, and today's date in ISO's form, if that is fixed.
"""

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, ext, nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from megajax.core.errors import UserError
from megajax.host.reading import is_unicode

Source = tuple[str, dict[str, str], str, str | None]
Messages = list[dict[str, Any]]
Chat = tuple[Messages, str, Mapping[str, Any]]  # the fields of `chat.Chat`
Span = tuple[int, int]

_MOST_CHARACTERS = 1 << 24  # in a rendered text
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning; templates use the first
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_STAND_IN = "thecontentofthismessage"


def check(source: Source) -> None:
    """Raise `UserError` unless it is a template."""
    _template(source)


def render(source: Source, chat: Chat, add_generation_prompt: bool) -> str:
    """See `ChatTemplate.render`."""
    messages, place, args = chat
    return _Rendering(_template(source), place, args).text(messages, add_generation_prompt)


def rendered(
    source: Source, records: Sequence[tuple[Chat, list[int]]], ends: Sequence[str], special: Sequence[str]
) -> list[tuple[str, list[Span]]]:
    """See `ChatTemplate.rendered`."""
    return [_rendered(_template(source), *record, tuple(ends), tuple(special)) for record in records]


def _rendered(
    template: "_Template", chat: Chat, answers: list[int], ends: tuple[str, ...], special: tuple[str, ...]
) -> tuple[str, list[Span]]:
    messages, place, args = chat
    rendering = _Rendering(template, place, args)
    text, blocks = rendering.marked(messages)
    if template.is_marked:
        spans = rendering.blocks_of(answers, messages, blocks)
    else:
        spans = [rendering.turn(text, messages, index, special) for index in answers]
    return text, [(start, _without_space(text, start, stop, ends)) for start, stop in spans]


class _Template:
    def __init__(self, source: str, tokens: Mapping[str, str], name: str, today: datetime | None) -> None:
        self.tokens, self.name, self.is_marked = tokens, name, bool(_MARKED.search(source))
        self.environment = _Sandbox(today)
        try:
            self.template = self.environment.from_string(source)
        except (TemplateError, RecursionError, ValueError, OverflowError, SyntaxError) as error:
            at = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise UserError(f"the chat template of {name}: {at}{_reason(error)}; valid: a template in Jinja") from None


def _template(source: Source) -> _Template:
    text, tokens, name, today = source
    return _compiled(text, tuple(tokens.items()), name, today)


@functools.lru_cache(8)
def _compiled(source: str, tokens: tuple[tuple[str, str], ...], name: str, today: str | None) -> _Template:
    return _Template(source, dict(tokens), name, datetime.fromisoformat(today) if today else None)


class _Rendering(NamedTuple):
    """Rendering a record with a template and its variables `args`."""

    template: _Template
    place: str
    args: Mapping[str, Any]

    def text(self, messages: Messages, prompt: bool = False) -> str:
        """The text of messages; `prompt`: and what precedes the assistant's next words."""
        return self.marked(messages, prompt)[0]

    def marked(self, messages: Messages, prompt: bool = False) -> tuple[str, list[Span]]:
        """The text of messages, and the ranges of the blocks that the template marks as the assistant's."""
        template, blocks, size = self.template, list[str](), 0
        template.environment.blocks, template.environment.generated = blocks, []
        try:
            for block in template.template.generate(
                messages=[_plain(message) for message in messages],
                **{"tools": None, "documents": None, **template.tokens, **self.args},
                add_generation_prompt=prompt,
            ):
                blocks.append(block)
                size += len(block)
                if size > _MOST_CHARACTERS:
                    raise TemplateError(f"more than {_MOST_CHARACTERS} characters")
        except MemoryError:
            raise
        except Exception as error:  # templates can fail in any way
            raise self.error(
                f"the chat template of {template.name} cannot render it: {_reason(error)}",
                "messages that the template accepts",
            ) from None
        text, spans = "".join(blocks), list[Span]()
        if not is_unicode(text):
            raise self.error("the rendered text contains half a character (\\ud800 to \\udfff)", "text")
        for start, marked in template.environment.generated:
            if not text.startswith(marked, start):
                raise UserError(
                    f"{template.name}: its {{% generation %}} is inside a macro or filter; valid: outside of both"
                )
            spans.append((start, start + len(marked)))
        return text, spans

    def blocks_of(self, answers: Sequence[int], messages: Messages, blocks: list[Span]) -> list[Span]:
        """Those of the text's blocks that are in the messages with these numbers."""
        assistants = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        if list(answers) == assistants:
            return blocks
        last = [len(self.marked(messages[: index + 1])[1]) for index in assistants]  # block of each, counted from 1
        bounds = [0, *last]
        if last[-1] != len(blocks) or any(first >= after for first, after in itertools.pairwise(bounds)):
            raise self.error(
                f"{self.template.name} marks other parts when more messages follow, so it is unknown which belong to "
                "a message that is not trained on",
                "records without such messages, or a template that marks every message of the assistant",
            )
        places = dict(zip(assistants, itertools.pairwise(bounds), strict=True))
        return [blocks[place] for index in answers for place in range(*places[index])]

    def turn(self, text: str, messages: Messages, index: int, special: tuple[str, ...]) -> Span:
        """The part of the whole text that the assistant writes in message `index`: from the end of its prompt to the
        end of the message.

        If the template renders the message differently when more follow it, its end is where the message with another
        content ends: everything after that content must be the same, except for the last token (`_end_of_turn`).
        """
        prompt = self.text(messages[:index], prompt=True)
        after = self.text(messages[: index + 1]) if index + 1 < len(messages) else text
        if after.startswith(prompt) and text.startswith(after):
            return len(prompt), len(after)
        other = [*messages[:index], {**messages[index], "content": _STAND_IN}, *messages[index + 1 :]]
        before, *rest = self.text(other).split(_STAND_IN)
        _, *end = self.text(other[: index + 1]).split(_STAND_IN)
        start = len(prompt) if text.startswith(prompt) else len(before)
        end_of_turn = _end_of_turn(end[0], rest[0], special) if len(rest) == len(end) == 1 else None
        if end_of_turn is not None and text.endswith(rest[0]):
            content_end = len(text) - len(rest[0])
            begins = text.startswith(prompt) or (text.startswith(before) and prompt.startswith(before))
            if begins and start <= content_end:
                return start, content_end + len(end_of_turn)
        raise self.error(
            f"{self.template.name} renders the text before message {index + 1} differently when more follows, so "
            "the assistant's part is unknown",
            "a template with {% generation %}, or fewer turns",
        )

    def error(self, problem: str, valid: str) -> UserError:
        return UserError(f"{self.place}: {problem}; valid: {valid}")


def _end_of_turn(last: str, rest: str, special: tuple[str, ...]) -> str | None:
    """How a turn ends that the `rest` follows, if it ends with `last` where nothing follows; None: unknown.

    A special token that `last` ends with may be another one here, as in GPT-OSS, or be missing after the turn's own, as
    in Phi-3, which ends the whole text with it.
    """
    if rest.startswith(last):
        return last
    token = max((mark for mark in special if last.rstrip().endswith(mark)), key=len, default="")
    same = last.rstrip().removesuffix(token)
    if not token or not rest.startswith(same):
        return None
    if any(mark in same for mark in special):
        return same
    other = max((mark for mark in special if rest.startswith(mark, len(same))), key=len, default="")
    after = rest[len(same + other) :].lstrip()  # another message begins with a special token
    return same + other if other and after.startswith(special) else None


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as `transformers` passes it to templates: without None values, and with reasoning under all names."""
    found = {key: value for key, value in message.items() if value is not None}
    thought = next((found[name] for name in _REASONING if name in found), None)
    return found if thought is None else {"thinking": thought, **found, "reasoning_content": thought}


def _without_space(text: str, start: int, stop: int, ends: tuple[str, ...]) -> int:
    """The end of a span, excluding white space after one of its `ends`."""
    part = text[start:stop].rstrip()
    return start + len(part) if part.endswith(ends) else stop


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox for templates, with everything that `transformers` provides."""

    def __init__(self, today: datetime | None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise_exception, "dict": _Dict(), "namespace": _Namespace}
        self.globals["strftime_now"] = lambda form: (today or datetime.now()).strftime(form)
        self.blocks: list[str] = []  # the text rendered so far
        self.generated: list[tuple[int, str]] = []  # start and text of each `{% generation %}` block


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
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

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
