"""Small tokenizers of the kinds that Llama, Qwen and Mistral have, as folders in Hugging Face's format."""

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [f"The {n}th text of {n * n} words — naïve, größer; def f_{n % 7}(x):\n    return x + {n}\n" for n in range(60)]
TURNS = [
    {"role": "user", "content": "Which day?"},
    {"role": "assistant", "content": "Monday.", "name": None},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Tuesday — größer."},
]

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
MARKED = (  # says itself what the assistant writes, as templates to train with do
    "{%- for message in messages -%}\n"
    "{%- if message.role == 'assistant' -%}\n"
    "<|im_start|>assistant\n{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}\n"
    "{%- else -%}\n<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}\n"
)
QWEN3 = (  # its structure: thoughts only after the last question, and an empty one where there is none
    "{%- set found = namespace(question=-1) %}"
    "{%- for message in messages %}{% if message.role == 'user' %}{% set found.question = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{%- for message in messages %}"
    "{%- set content = message.content %}"
    "{%- if message.role != 'assistant' %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- else %}"
    "{%- set thought = message.reasoning_content or '' %}"
    "{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > found.question and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{{- content + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{%- endif %}"
)

_LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _special(content: str) -> AddedToken:
    return AddedToken(content, special=True, normalized=False)


def _byte_level(regex: str, *, ignore_merges: bool) -> Any:
    core = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(TEXTS, trainer)
    return core


@functools.cache
def llama3() -> dict[str, Any]:
    """Files of an instruct model: a begin of text, several ends of a generation."""
    core = _byte_level(_LLAMA3_REGEX, ignore_merges=True)
    core.add_special_tokens([_special(token) for token in _LLAMA3_SPECIAL])
    begin = _LLAMA3_SPECIAL[0]
    template = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, core.token_to_id(begin))]
    )
    core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": "<|eot_id|>"}
    decoder = {str(core.token_to_id(token)): {"content": token, "special": True} for token in _LLAMA3_SPECIAL}
    settings |= {"clean_up_tokenization_spaces": True, "chat_template": LLAMA3, "added_tokens_decoder": decoder}
    ends = [core.token_to_id("<|end_of_text|>"), core.token_to_id("<|eot_id|>")]
    return {
        "tokenizer.json": core.to_str(),
        "tokenizer_config.json": settings,
        "special_tokens_map.json": {"bos_token": {"content": begin}, "eos_token": {"content": "<|eot_id|>"}},
        "generation_config.json": {"eos_token_id": ends, "do_sample": True},
    }


@functools.cache
def qwen() -> dict[str, Any]:
    """Files with a normalizer, without a begin, and with a list of templates; vocab.json lacks the added tokens."""
    core = _byte_level(_LLAMA3_REGEX.replace("{1,3}", ""), ignore_merges=False)
    core.normalizer = normalizers.NFC()
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    core.add_special_tokens([_special(token) for token in _QWEN_SPECIAL])
    core.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    model = json.loads(core.to_str())["model"]
    templates = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ tools }}"}]
    settings = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>"}
    return {
        "tokenizer.json": core.to_str(),
        "tokenizer_config.json": settings | {"add_bos_token": True, "chat_template": templates},
        "vocab.json": model["vocab"],
        "merges.txt": "#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in model["merges"]),
    }


@functools.cache
def mistral() -> dict[str, Any]:
    """Files of a tokenizer converted from SentencePiece: spaces as a letter, bytes where letters are unknown; the
    settings deny the begin that the post-processor puts there; the template is a file of its own."""
    learned = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    learned.pre_tokenizer = pre_tokenizers.Metaspace()  # so that no token goes on over a space
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False)
    learned.train_from_iterator([text.encode("ascii", "ignore").decode() for text in TEXTS], trainer)
    content = json.loads(learned.to_str())
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in content["model"]["vocab"] if token not in tokens]
    content["model"]["vocab"] = {token: number for number, token in enumerate(tokens)}
    core = Tokenizer.from_str(json.dumps(content | {"pre_tokenizer": None}))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    core.add_special_tokens([_special(token) for token in tokens[:3]])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, "legacy": True}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return {
        "tokenizer.json": core.to_str(pretty=True),
        "tokenizer_config.json": settings,
        "chat_template.jinja": MISTRAL,
        "config.json": {"eos_token_id": 2},
    }


KINDS = {"llama3": llama3, "qwen": qwen, "mistral": mistral}


def write_saved(folder: Path, kind: str) -> Path:
    """A folder with the files of a kind."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in KINDS[kind]().items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def write_pair(folder: Path, tokenizer: Any) -> None:
    """`vocab.json` and `merges.txt` of one of ours."""
    model = json.loads(tokenizer.files["tokenizer.json"])["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in model["merges"]))


def write_vocabulary(folder: Path, tokenizer: Any) -> None:
    """`vocab.txt` of one of ours."""
    tokens = sorted(tokenizer.vocabulary, key=tokenizer.vocabulary.__getitem__)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
