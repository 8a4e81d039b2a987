"""What is not a BERT like ours is refused in one line that names file and field."""

import re
from pathlib import Path

import pytest
from hugging_face_bert import SETTINGS, TASK_CLASSES, bert_tensors, write_bert
from refusals import assert_setting_refused, refusal

from megajax.convert.importing import open_source


@pytest.mark.parametrize(
    ("field", "value", "valid"),
    [
        ("model_type", "roberta", '"qwen3", "megatron-bert", "bert"'),
        ("architectures", ["BertModel"], r'\["BertForPreTraining"\], \["BertForMaskedLM"\]'),
        ("architectures", ["MegatronBertForPreTraining"], r'\["BertForPreTraining"\], \["BertForMaskedLM"\]'),
        ("hidden_act", "gelu_new", '"gelu"'),
        ("position_embedding_type", "relative_key", '"absolute"'),
        ("is_decoder", True, "false"),
        ("add_cross_attention", True, "false"),
        ("type_vocab_size", 1, "2"),
        ("tie_word_embeddings", False, "true"),
        ("layer_norm_eps", 1e-5, "1e-12"),
        ("intermediate_size", 100, "96"),
        ("intermediate_size", None, "96"),
        ("num_hidden_layers", 9999, "number of layers"),
        ("max_position_embeddings", 0, "1 to 1000000"),
        ("hidden_size", "24", "whole number"),
        ("num_attention_heads", 5, "multiple"),
        ("attention_probs_dropout_prob", 0.1, r"all the same, or --model\.dropout"),
        ("hidden_dropout_prob", 1, "less than 1"),
    ],
)
def test_settings(field: str, value: object, valid: str, tmp_path: Path) -> None:
    assert_setting_refused(write_bert(tmp_path, **{field: value}), field, valid)


@pytest.mark.parametrize(
    ("head", "field", "value", "valid"),
    [
        ("classes", "problem_type", "regression", 'null, "single_label_classification"'),
        ("classes", "problem_type", "multi_label_classification", 'null, "single_label_classification"'),
        ("classes", "num_labels", 1, "2 to 10000"),
        ("classes", "num_labels", "2", "whole number"),
        ("classes", "id2label", {"0": "one"}, "two classes or more"),
        ("classes", "id2label", {"1": "a", "2": "b"}, "numbers from 0 on"),
        ("classes", "id2label", {"0": "a", "1": 1}, "a name for each"),
        ("classes", "id2label", ["a", "b"], "a name for each"),
        ("classes", "id2label", {"0": "1", "1": "0"}, "in the order of qqp, 0, 1"),
        (
            "classes",
            "id2label",
            {"0": "CONTRADICTION", "1": "NEUTRAL", "2": "ENTAILMENT"},
            "in the order of mnli, entailment, neutral, contradiction",
        ),
        ("span", "id2label", {"0": "a", "1": "b", "2": "c"}, "two labels, a span's start and its end"),
        ("span", "num_labels", 3, "two labels, a span's start and its end"),
    ],
)
def test_labels(head: str, field: str, value: object, valid: str, tmp_path: Path) -> None:
    """What does not tell two classes or more apart, or has a task's classes under other numbers."""
    tensors, architectures = bert_tensors("post", SETTINGS, head), [TASK_CLASSES[head]]
    write_bert(tmp_path, "post", tensors, architectures=architectures, **{field: value})
    assert_setting_refused(tmp_path, field, valid)


def test_tensors_of_heads(tmp_path: Path) -> None:
    """Missing, of another number of classes, pretraining's or another head's."""
    heads = {head: bert_tensors("pre", SETTINGS, head) for head in TASK_CLASSES}
    bias = {name: tensor for name, tensor in bert_tensors("pre").items() if name == "cls.predictions.bias"}
    missing = r"holds? .*cls\.predictions\.bias; valid: only what a MegatronBertForSequenceClassification has"
    unpooled = {name: tensor for name, tensor in heads["choice"].items() if "pooler" not in name}
    cases = [
        ("classes", heads["choice"], r"classifier\.weight has shape \[1, 24\]; valid: \[2, 24\], by config"),
        (
            "classes",
            heads["span"],
            r"classifier\.weight and 1 more missing .*valid: all of a BERT with a head of cl",
        ),
        ("classes", heads["classes"] | bias, missing),
        (
            "span",
            heads["classes"],
            r"qa_outputs\.weight, qa_outputs\.bias missing .*valid: all of a BERT with a head of sp",
        ),
        (
            "span",
            heads["span"] | heads["classes"],
            r"holds classifier\.bias, .*only what a MegatronBertForQuestionAnswering",
        ),
        ("choice", heads["classes"], r"classifier\.weight has shape \[2, 24\]; valid: \[1, 24\], by config"),
        (
            "choice",
            unpooled,
            r"bert\.pooler\.dense\.weight, bert\.pooler\.dense\.bias missing .*with a head of choices",
        ),
    ]
    for head, tensors, words in cases:
        write_bert(tmp_path, "pre", tensors, architectures=["Megatron" + TASK_CLASSES[head]])
        assert re.search(words, refusal(tmp_path)), (words, refusal(tmp_path))


def test_what_may_be_left_out(tmp_path: Path) -> None:
    """Fields that older files lack; the class of the model, which its tensors tell."""
    write_bert(tmp_path, "pre", architectures=None, attention_probs_dropout_prob=0.2)
    assert open_source(tmp_path, {"model.dropout": 0.3}).config.model.dropout == 0.3
    assert "vocab_size is null" in refusal(write_bert(tmp_path, "pre", without=["vocab_size"]))


def test_tensors(tmp_path: Path) -> None:
    """Missing, of another shape, too many, of the other layer order, a head of its own, without any head."""
    good = bert_tensors("post")
    table, bias = good["bert.embeddings.word_embeddings.weight"], good["cls.predictions.bias"]
    headless = {name: tensor for name, tensor in good.items() if not name.startswith("cls.")}
    half = {name: tensor for name, tensor in good.items() if name != "cls.seq_relationship.bias"}
    layer = "bert.encoder.layer.0."
    turned = {f"{layer}output.dense.weight": good[f"{layer}output.dense.weight"].T.copy()}
    cases = [
        (half, r"cls\.seq_relationship\.bias missing .*valid: all of a BERT with a head of masked tokens"),
        (headless, r"cls\.predictions\.transform\.dense\.weight, .* missing"),
        (good | turned, r"output\.dense\.weight has shape \[96, 24\]; valid: \[24, 96\]"),
        (good | {"classifier.weight": bias}, r"holds classifier\.weight; valid: only what a BertForPreTraining has"),
        (good | {"cls.predictions.decoder.weight": 2 * table}, r"decoder\.weight differs from bert\.embeddings"),
        (good | {"cls.predictions.decoder.bias": bias + 1}, r"decoder\.bias differs from cls\.predictions\.bias"),
        (bert_tensors("pre"), r"bert\.embeddings\.LayerNorm\.weight, .* and 7 more missing"),
    ]
    for tensors, words in cases:
        assert re.search(words, refusal(write_bert(tmp_path, "post", tensors))), words
