"""WikiText-103's text as it was written, rule by rule, and the paper's two counts."""

import gzip
import json

import pytest

from megajax.core.errors import UserError
from megajax.data.samples.gpt import EvaluationSamples
from megajax.data.text.tokenizers import train_tokenizer
from megajax.evaluation.pretrained import detokenize, read_wikitext


@pytest.mark.parametrize(
    ("spaced", "plain"),
    [
        ("the players ' union", "the players' union"),
        ("well @-@ known", "well-known"),
        ("1 @,@ 000", "1,000"),
        ("3 @.@ 14", "3.14"),
        ("so : this", "so: this"),
        ("this ; that", "this; that"),
        ("done . Next", "done. Next"),
        ("stop ! Now", "stop! Now"),
        ("why ? Because", "why? Because"),
        ("one , two", "one, two"),
        ("a ( round one ) b", "a (round one) b"),
        ("a [ square one ] b", "a [square one] b"),
        ("a { curly one } b", "a {curly one} b"),
        ('he said " so what " then', 'he said "so what" then'),
        ("he said ' no more ' then", "he said 'no more' then"),
        ("= = = = Deep = = = =", "==== Deep ===="),
        ("= = = Deep = = =", "=== Deep ==="),
        ("= = Flat = =", "== Flat =="),
        ("at 40 ° C", "at 40°C"),
        ("over \n the line", "over\nthe line"),
        ("at 60 N 5 E", "at 60 1 5 E"),
        ("the dog 's bone", "the dog's bone"),
        ("( a ) ( b ) , ( ) <unk>", "(a) (b), () <unk>"),
        ('as it was: "so", (he\'s) 1,000 @-@', 'as it was: "so", (he\'s) 1,000 @-@'),
    ],
)
def test_every_rule(spaced, plain):
    assert detokenize(spaced) == plain


def test_the_paper_s_counts(gpt2_tokenizer, test_data):
    words, text = read_wikitext(str(test_data / "wikitext-103" / "wiki.test.tokens"), gpt2_tokenizer)
    samples = EvaluationSamples(text, sequence_length=1024, overlap=32)
    assert words == 245_566
    assert (text.num_tokens, samples.num_targets) == (270_330, 270_329)
    assert len(samples) == 1 + -(-(270_329 - 1024) // 32)


def test_what_is_no_such_file(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("one two", "three four five"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "lines.jsonl").write_text("{}")
    (tmp_path / "empty.txt").write_text("")
    tokenizer = train_tokenizer(["text"], 300)
    for path in tmp_path / "a.jsonl.gz", tmp_path / "lines.jsonl", tmp_path, "python-stdlib", "":
        with pytest.raises(UserError, match=rf"^--data '{path}'; valid: one file of plain text"):
            read_wikitext(str(path), tokenizer)
    with pytest.raises(UserError, match=r"^--data: .*empty\.txt contains no text"):
        read_wikitext(str(tmp_path / "empty.txt"), tokenizer)
