"""Chat templates: texts as published, what the assistant writes of them, and what no template gets away with."""

from datetime import datetime

import pytest
from saved_tokenizers import CHATML, LLAMA3, MARKED, MISTRAL, QWEN3, TURNS

from megajax.core.errors import UserError
from megajax.data.text.chat import Chat, ChatTemplate, Rendered, checked_args
from megajax.host import limited

ENDS = ("<|im_end|>", "</s>", "<|eot_id|>", "<|end|>", "<|return|>")


def template(source: str, **more) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, "a.jinja", **more)


def rendered(source: str, messages=TURNS, answers=(1, 3), place="x", **args) -> Rendered:
    special = *ENDS, "<|im_start|>", "<|start|>", "<|message|>", "<|user|>", "<|assistant|>"
    (found,) = template(source).rendered([Chat(messages, place, args)], [answers], ENDS, special)
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


def parts(source: str, *args, **more) -> list[str]:
    """What the assistant writes, without its end."""
    found = rendered(source, *args, **more)
    texts = [found.text[start:stop] for start, stop in found.spans]
    return [next(text.removesuffix(end) for end in ENDS if text.endswith(end)) for text in texts]


@pytest.mark.parametrize("source", [CHATML, LLAMA3, MISTRAL, MARKED])
def test_what_the_assistant_writes(source):
    assert parts(source) == ["Monday.", "Tuesday — größer."]
    assert parts(source, answers=(3,)) == ["Tuesday — größer."] and parts(source, answers=(1,)) == ["Monday."]
    assert rendered(source, TURNS[:1], ()).spans == []


def test_a_template_that_renders_earlier_turns_differently():
    """Qwen3's leaves out what was thought in earlier turns; its prompt can end with an empty thought."""
    empty, thought = "<think>\n\n</think>\n\n", "<think>\nHm.\n</think>\n\n"
    assert parts(QWEN3) == ["Monday.", f"{empty}Tuesday — größer."] and parts(QWEN3, answers=(1,)) == ["Monday."]
    assert parts(QWEN3, enable_thinking=False) == ["Monday.", "Tuesday — größer."]
    assert parts(QWEN3, [TURNS[0], {**TURNS[1], "content": ""}, *TURNS[2:]])[0] == ""
    said = {"role": "assistant", "content": f"{thought}So."}, {**TURNS[1], "reasoning": "Hm.", "content": "So."}
    for answer in said:
        assert parts(QWEN3, [TURNS[0], answer] * 2) == ["So.", f"{thought}So."]
    tool = {"role": "tool", "content": "7"}
    assert parts(QWEN3, [*TURNS[:2], tool, TURNS[3]]) == ["Monday.", f"{empty}Tuesday — größer."]
    assert parts(QWEN3, TURNS[1:], (0, 2)) == ["Monday.", f"{empty}Tuesday — größer."]  # nothing before the first


EACH = "{% for m in messages %}{% set last = loop.last and m.role == 'assistant' %}"
LAST = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% else %}</s>{% endif %}"
GPT_OSS = "<|start|>{{ m.role }}<|message|>{{ m.content }}{{ '<|return|>' if last else '<|end|>' }}{% endfor %}"
GPT_OSS += "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
OLMO3 = "<|im_start|>{{ m.role }}\n{{ m.content }}{{ '</s>' if last else '<|im_end|>\n' }}{% endfor %}"
OLMO3 += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def test_the_last_token_of_a_turn_differs_where_others_follow() -> None:
    for source, *ends in (
        (GPT_OSS, "<|end|>", "<|return|>"),
        (OLMO3, "<|im_end|>", "</s>"),
        ("<|{{ m.role }}|>{{ m.content }}<|end|>" + LAST, "<|end|>", "<|end|></s>"),  # Phi-3
    ):
        found = rendered(EACH + source)
        said = [found.text[start:stop].removeprefix("<|message|>") for start, stop in found.spans]
        assert said == [f"Monday.{ends[0]}", f"Tuesday — größer.{ends[1]}"]
    with pytest.raises(UserError, match=r"^x: a.jinja renders the text before message 2 differently when more follows"):
        rendered(EACH + "<|{{ m.role }}|>{{ m.content }}" + LAST)  # no end but the whole text's


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
    last = "{% for m in (messages | selectattr('role', 'eq', 'assistant') | list)[-1:] %}"
    last += "{% generation %}x{% endgeneration %}{% endfor %}"
    with pytest.raises(UserError, match=r"^x: a.jinja marks other parts when more messages follow, .*; valid: "):
        rendered(last, answers=(3,))


def test_what_transformers_gives_to_templates():
    source = "{{ messages[0].content | tojson }} {{ strftime_now('%d %b %Y') }} {% set n = namespace(x=1) %}"
    source += "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% set n.x = n.x + 1 %}{% endfor %}"
    found = template(source + "{{ n.x }}{{ tools is none }}", today=datetime(2024, 7, 26))
    assert found.render([{"role": "user", "content": "<ö>"}] * 2, "x") == '"<ö>" 26 Jul 2024 2True'
    args = template("{{ a }}{{ b is defined }}{{ eos_token }}")
    assert args.render(TURNS, "x", template_args={"a": [1], "eos_token": "e"}) == "[1]Falsee"
    for wrong in ([], {"messages": []}, {"add_generation_prompt": True}):
        with pytest.raises(UserError, match=r"^f:7: args.*; valid: .*variables of the chat template"):
            checked_args(wrong, "f:7: args")


def test_half_a_character():
    half = {"role": "user", "content": "a", "name": "\ud800"}
    for source in ("{{ messages[0].name }}", "{{ '\\ud800' }}", "\ud800"):
        with pytest.raises(UserError, match=r"^f:7: the rendered text contains half a character .*; valid: text$"):
            template(source).render([half], "f:7")
    assert template("{{ messages[0].content }}").render([half], "x") == "a"


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
        ("{{ 'a' * 10 ** 9 }}", "takes more than 256 MiB of memory"),
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


def test_what_takes_too_much_names_the_record(monkeypatch):
    """Of records that are rendered together; the others can be rendered. What meets the limit of memory has all the
    time that a slow machine takes."""
    double = "{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    square = "{% for i in range(60) %}{% set n.y = n.y * n.y %}{% endfor %}"
    source = template(
        f"{{% set n = namespace(x='ab', y=3) %}}{{% if messages[0].content == 'x' %}}{double}"
        f"{{% elif messages[0].content == 'y' %}}{square}{{% endif %}}{{{{ messages[0].content }}}}"
    )
    chats = [Chat([{"role": "user", "content": content}], f"f:{content}") for content in "aaxy"]
    assert [found.text for found in source.rendered(chats[:2], [()] * 2)] == ["a", "a"]
    with pytest.raises(UserError, match=r"^f:x: the chat template of a.jinja takes more than 256 MiB of memory; valid"):
        list(source.rendered(chats[:3], [()] * 3))
    with (
        monkeypatch.context() as shorter,
        pytest.raises(UserError, match=r"^f:y: the chat template of a.jinja takes more than 0.5 seconds; valid: one"),
    ):
        shorter.setattr(limited, "SECONDS", 0.5)
        list(source.rendered(chats[3:], [()]))
    assert [found.text for found in source.rendered(chats[:2], [()] * 2)] == ["a", "a"]
