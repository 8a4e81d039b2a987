"""Chat templates: texts as published, what the assistant writes of them, and what no template gets away with."""

from datetime import datetime

import pytest
from saved_tokenizers import CHATML, LLAMA3, MARKED, MISTRAL, TURNS

from megajax.data.chat import Chat, ChatTemplate, Rendered
from megajax.errors import UserError

ENDS = ("<|im_end|>", "</s>", "<|eot_id|>")


def template(source: str, **more) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, "a.jinja", **more)


def rendered(source: str, messages=TURNS, answers=(1, 3), place="x", **args) -> Rendered:
    (found,) = template(source).rendered([Chat(messages, place, args)], [answers], ENDS)
    return found


def test_texts():
    assert template(MISTRAL).render(TURNS[:3], "x") == "<s>[INST] Which day? [/INST]Monday.</s>[INST] And then? [/INST]"
    assert template(CHATML).render(
        [{"role": "system", "content": "S"}, *TURNS[:1]], "x", add_generation_prompt=True
    ) == ("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nWhich day?<|im_end|>\n<|im_start|>assistant\n")
    assert template(LLAMA3).render(TURNS[:1], "x", add_generation_prompt=True) == (
        "<s><|start_header_id|>user<|end_header_id|>\n\nWhich day?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize("source", [CHATML, LLAMA3, MISTRAL, MARKED])
def test_what_the_assistant_writes(source):
    found = rendered(source)
    parts = [found.text[start:stop] for start, stop in found.spans]
    assert [next(part.removesuffix(end) for end in ENDS if part.endswith(end)) for part in parts] == [
        "Monday.",
        "Tuesday — größer.",
    ]
    assert rendered(CHATML, TURNS[:1], ()).spans == []


def test_conversations_of_which_it_is_not_known_what_the_assistant_writes():
    """Markers in a macro that is not where it is called; earlier turns written anew, without what was thought there."""
    inside = "{% macro say() %}{% generation %}x{% endgeneration %}{% endmacro %}a{{ 'y' ~ say() }}"
    rewriting = "{% for m in messages %}[{{ m.role }}{% if loop.last %}: {{ m.content }}{% endif %}]{% endfor %}"
    for source, problem in (
        (inside, "is inside a macro or filter; valid: outside of both"),
        (rewriting, r"^f:7: a.jinja renders the text before message 2 differently .*; valid: a te"),
    ):
        with pytest.raises(UserError, match=problem):
            rendered(source, place="f:7")


def test_what_transformers_gives_to_templates():
    source = "{{ messages[0].content | tojson }} {{ strftime_now('%d %b %Y') }} {% set n = namespace(x=1) %}"
    source += "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% set n.x = n.x + 1 %}{% endfor %}"
    found = template(source + "{{ n.x }}{{ tools is none }}", today=datetime(2024, 7, 26))
    assert found.render([{"role": "user", "content": "<ö>"}] * 2, "x") == '"<ö>" 26 Jul 2024 2True'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "line 1: Expected an expression"),
        ("{{ raise_exception('Roles must\nalternate') }}", "Roles must"),
        ("{{ messages[0].content.x.y }}", "no attribute 'x'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set n = namespace(_x=1) %}", "in a namespace"),
        ("{{ 'a' * 10 ** 9 }}", "more than"),
        ("{{ [[1] * 9000] * 9000 }}", "a product of lists"),
        ("{{ '%999999999d' % 3 }}", "more than"),
        ("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "more than"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ '('" + " ~ (" * 400 + "1" + ")" * 400 + "}}", ""),
        ("a" * (1 << 21), "valid: at most"),
    ],
)
def test_refused_templates(source, message):
    with pytest.raises(UserError) as refusal:
        template(source).render(TURNS, "f.jsonl:7")
    text = str(refusal.value)
    assert message in text and "; valid: " in text and len(text.splitlines()) == 1 and "a.jinja" in text
