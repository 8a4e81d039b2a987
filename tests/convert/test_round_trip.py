"""What goes out and in again is the same, bit for bit, in every form that files take."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from canonical_weights import exported, from_tensors, weights_of
from hugging_face import (
    BIASES,
    DECODERS,
    DEEPSEEKS,
    HYBRIDS,
    MIXTURES,
    ORDERS,
    SETTINGS,
    TIED,
    assert_same,
    class_of,
    random_tensors,
    refusal,
    tensors_in,
    write_model,
)
from safetensors.numpy import load_file, save_file
from tiny import full, tiny_config, tiny_program

from megajax.convert.exporting import export_config, export_hf
from megajax.convert.importing import import_hf, open_source
from megajax.core.errors import UserError
from megajax.core.program import state
from megajax.data.tasks.registry import TASKS, TaskConfig
from megajax.data.text.tokenizers import load_tokenizer, train_tokenizer
from megajax.runs.checkpoint import Checkpoints
from megajax.settings.presets import load_preset, resolve

IDS = {"bos_token_id": 1, "eos_token_id": [2, 7]}
NAMES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize(
    ("kind", "dtype", "settings"),
    [
        full("gpt2", "float32", {}),
        ("gpt2", "float16", {}),
        full("bert", "float32", {}),
        full("megatron-bert", "float32", {}),
        ("llama", "bfloat16", {}),
        full("gpt2", "bfloat16", {}),
        full("qwen3", "float16", TIED),
        full("llama", "float32", BIASES | TIED),
        full("qwen2", "bfloat16", TIED),
        full("mistral", "float16", {"sliding_window": 5}),
        ("mixtral", "bfloat16", {}),
        full("qwen3_moe", "float16", {"norm_topk_prob": True}),
        full("qwen3_next", "float32", {"norm_topk_prob": False}),
        ("qwen3_next", "bfloat16", {"partial_rotary_factor": 0.25}),
        full("qwen3_5_text", "float32", TIED),
        full("qwen3_5_moe_text", "float16", {}),
        full("olmoe", "float32", {"norm_topk_prob": False}),
        ("gpt_oss", "bfloat16", {"swiglu_limit": 5.5, "sliding_window": 7}),
        ("deepseek_v3", "float16", {"q_lora_rank": None, "num_nextn_predict_layers": 1}),
        full("deepseek_v2", "bfloat16", {}),
        ("olmo_hybrid", "bfloat16", {}),
        full("kimi_linear", "float16", {}),
    ],
)
@pytest.mark.slow
def test_import_then_export(kind: str, dtype: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """In several files: the identical tensors, the class, the settings, what ends a generation, the tokenizer."""
    folder, run, back = tmp_path / "hf", tmp_path / "run", tmp_path / "back"
    rotary = kind in (*DECODERS, *MIXTURES, *DEEPSEEKS, *HYBRIDS)
    decodes, settings = kind not in ORDERS, settings | IDS if rotary else settings
    tensors = random_tensors(kind, NAMES[dtype], **settings)
    in_fp32 = "correction_bias", "A_log"
    tensors |= {name: each.astype(np.float32) for name, each in tensors.items() if name.endswith(in_fp32)}
    write_model(folder, kind, tensors, **settings)
    if decodes:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}))
    else:
        train_tokenizer(["some words of some text"], 100, "wordpiece").save(folder)
    source = open_source(folder, {"model.sequence_length": 16} if rotary else {})
    assert not source.weights.fresh
    import_hf(source, run)
    config = resolve(load_preset(run / "config.toml"))
    assert config.model == source.config.model and config.optimizer.learning_rate == 5e-5
    assert config.run_dir == str(run) and config.model.sequence_length == (16 if rotary else 24)
    export_hf(run, export_config(run), back, shard_bytes=sum(tensor.nbytes for tensor in tensors.values()) // 3)

    assert_same(tensors_in(back), tensors)
    fields = json.loads((back / "config.json").read_text())
    expected = SETTINGS[kind] | settings | {"dtype": dtype, "model_type": kind, "architectures": [class_of(kind)]}
    if kind == "deepseek_v2":  # it has no prediction modules
        expected.pop("num_nextn_predict_layers")
    assert fields.items() >= (expected if decodes else expected | {"pad_token_id": 0}).items()
    index = json.loads((back / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in back.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files and len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    kept = "generation_config.json" if decodes else "tokenizer.json"
    assert json.loads((back / kept).read_text()) == json.loads((folder / kept).read_text())
    again, first = open_source(back), open_source(folder)
    assert again.config == first.config and again.tokenizer == first.tokenizer
    assert not rotary or again.origin == first.origin
    if kind == "gpt2":
        export_hf(run, export_config(run), tmp_path / "wide", dtype="fp32")
        wide = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
        assert_same(load_file(tmp_path / "wide" / "model.safetensors"), wide)


@pytest.mark.parametrize(
    ("stored", "named", "overrides", "expected"),
    [
        ("float32", {"torch_dtype": "bfloat16"}, {}, "bf16"),
        ("bfloat16", {"dtype": "float32", "torch_dtype": "float16"}, {}, "fp32"),
        ("float16", {"dtype": None}, {}, "fp16"),
        ("bfloat16", {}, {}, "bf16"),
        ("float16", {"dtype": "float16"}, {"precision": "bf16"}, "bf16"),
    ],
)
def test_a_run_computes_in_the_models_dtype(stored: str, named: dict, overrides: dict, expected: str, tmp_path: Path):
    """The one that config.json names, otherwise that of the tensors."""
    folder = write_model(tmp_path, "gpt2", random_tensors("gpt2", NAMES[stored]), **named)
    assert open_source(folder, overrides).config.precision == expected


def test_every_tensor_keeps_its_dtype(tmp_path: Path) -> None:
    """What the class keeps in fp32 is never rounded, whatever it came in and whatever `--dtype` says."""
    tensors = random_tensors("gpt_oss", ml_dtypes.bfloat16)
    norms = {name for name in tensors if name.endswith("norm.weight")}
    tensors |= {name: np.float32(1.001) * tensors[name].astype(np.float32) for name in norms}
    run = tmp_path / "run"
    import_hf(open_source(write_model(tmp_path / "hf", "gpt_oss", tensors)), run)
    for dtype, expected in (
        (None, tensors),
        ("fp16", {name: each if name in norms else each.astype(np.float16) for name, each in tensors.items()}),
    ):
        export_hf(run, export_config(run), tmp_path / f"{dtype}", dtype=dtype)
        assert_same(tensors_in(tmp_path / f"{dtype}"), expected)
    assert json.loads((tmp_path / "None" / "config.json").read_text())["dtype"] == "bfloat16"


def test_mxfp4_is_widened(tmp_path: Path) -> None:
    """As gpt-oss is published: exactly, and exported in bf16; blocks of another shape are refused."""
    settings: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}
    config = settings | {"quantization_config": {"quant_method": "mxfp4"}}
    expected, rng = random_tensors("gpt_oss", ml_dtypes.bfloat16, **settings), np.random.default_rng(1)
    stored, numbers = dict(expected), np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [name for name in expected if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inside, outside = stored.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outside, inside // 32, 16), np.uint8)
        scales = rng.integers(100, 140, blocks.shape[:3], np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        index = np.indices((experts, inside, outside))
        byte = blocks[index[0], index[2], index[1] // 32, index[1] % 32 // 2]
        scale = 2.0 ** (scales[index[0], index[2], index[1] // 32].astype(int) - 127)
        expected[name] = (numbers[np.where(index[1] % 2, byte // 16, byte % 16)] * scale).astype(ml_dtypes.bfloat16)
    source = open_source(write_model(tmp_path / "hf", "gpt_oss", stored, **config))
    import_hf(source, tmp_path / "run")
    export_hf(tmp_path / "run", export_config(tmp_path / "run"), tmp_path / "back")
    found = tensors_in(tmp_path / "back")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, expected[name])
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    stored["model.layers.0.mlp.experts.down_proj_scales"] = stored["model.layers.0.mlp.experts.down_proj_scales"][
        ..., :1
    ]
    line = refusal(write_model(tmp_path / "hf", "gpt_oss", stored, **config))
    assert (
        "down_proj_blocks has shape [5, 32, 2, 16] U8 with scales [5, 32, 1] U8; valid: 16 bytes (U8) a block" in line
    )


@pytest.mark.parametrize(
    ("kind", "task", "names", "words"),
    [
        ("gpt2", "pretraining", [], {"precision": "bf16", "num_heads": 4, "tokenizer": "bpe"}),
        full("bert", "pretraining", [], {}),
        full("megatron-bert", "mnli", ["entailment", "neutral", "contradiction"], {}),
        full("bert", "qqp", ["0", "1"], {}),
        full("bert", "squad2", ["LABEL_0", "LABEL_1"], {}),
        full("megatron-bert", "race", ["A", "B", "C", "D"], {}),
    ],
)
@pytest.mark.slow
def test_export_then_import(kind: str, task: str, names: list[str], words: dict[str, Any], tmp_path: Path) -> None:
    """A run on (1, 2, 2): the main weights without the vocabulary's padding, a task's names of its classes; as another
    run they have fresh optimizer state."""
    sizes = {"num_layers": 2, "num_heads": 4, "sequence_length": 24, "dropout": 0.25, "vocab_size": 300}
    tokenizer = train_tokenizer(["some words of some text"], 300) if words.pop("tokenizer", "") else None
    head = TASKS[task].head if names else "pretraining"
    if kind in ORDERS:
        sizes |= {"family": "bert", "layer_order": ORDERS[kind], "head": head}
        sizes |= {"num_classes": TASKS[task].classes} if names else {}
    config = dataclasses.replace(tiny_config((1, 2, 2), **sizes | words), task=TaskConfig(name=task))
    tensors = random_tensors(kind, head=head, classes=len(names), vocab_size=300)
    weights, program = from_tensors(tensors, config.model), tiny_program(config)
    padded = [weights["shared"]["table"]]
    padded += [weights["shared"]["head"]["masked"]["bias"]] if kind in ORDERS and not names else []
    for rows in padded:
        rows[300:] = 1
    there = exported(tmp_path, program, config, program.layout.from_canonical(program.layout.begin(weights)), tokenizer)
    assert_same(load_file(there / "model.safetensors"), tensors)
    fields = json.loads((there / "config.json").read_text())
    assert fields["architectures"] == [class_of(kind, head)]
    if names:
        assert fields["id2label"] == {str(n): name for n, name in enumerate(names)}
        assert fields["label2id"] == {name: n for n, name in enumerate(names)}
    settings = {"config.json"} | ({"generation_config.json"} if kind == "gpt2" else set())
    beside = {"tokenizer.json", "tokenizer_config.json"} if tokenizer else set()
    assert {file.name for file in there.iterdir()} == settings | beside | {"model.safetensors"}

    source = open_source(there, {"model.vocab_multiple": 64})
    assert source.tokenizer == tokenizer
    assert source.config.model == dataclasses.replace(config.model, scan_layers="auto")
    import_hf(source, tmp_path / "again")
    if tokenizer:
        assert load_tokenizer(tmp_path / "again" / "data" / "tokenizer") == tokenizer
    one = tiny_program(resolve(load_preset(tmp_path / "again" / "config.toml")))
    reader = Checkpoints(tmp_path / "again", one.layout)
    assert reader.steps() == [0]
    found = jax.device_get(one.layout.to_canonical(reader.restore(0)))
    reader.close()
    for rows in padded:
        rows[300:] = 0
    jax.tree.map(np.testing.assert_array_equal, found.params, weights)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((found.step, found.optimizer)))


def test_what_older_files_have(tmp_path: Path) -> None:
    """Names without a prefix, or as TensorFlow had them, masks, angles and positions, a tied head once more, the pooler
    of a span: the same weights."""
    gpt2, bert, llama = random_tensors("gpt2"), random_tensors("bert"), random_tensors("llama", **TIED)
    short = {name.removeprefix("transformer."): tensor for name, tensor in gpt2.items()}
    short |= {f"h.{layer}.attn.bias": np.tri(24, dtype=np.uint8)[None, None] for layer in range(2)}
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in bert.items()
    }
    table, positions = bert["bert.embeddings.word_embeddings.weight"].copy(), np.arange(24)[None]
    older |= {"cls.predictions.decoder.weight": table, "cls.predictions.decoder.bias": bert["cls.predictions.bias"] + 0}
    angles = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for n in range(2)}
    span = random_tensors("bert", head="span")
    pooler = {f"bert.pooler.dense.{part}": bert[f"bert.pooler.dense.{part}"] for part in ("weight", "bias")}
    qwen = random_tensors("qwen3_next")
    masked, head = {"architectures": ["BertForMaskedLM"]}, {"architectures": [class_of("bert", "span")]}
    for number, (kind, tensors, further, settings) in enumerate(
        (
            ("gpt2", gpt2, short | {"h.1.attn.masked_bias": np.full((), -1e4, np.float32)}, {}),
            ("gpt2", gpt2, gpt2 | {"lm_head.weight": gpt2["transformer.wte.weight"].copy()}, {}),
            ("bert", bert, older | {"bert.embeddings.position_ids": positions}, masked),
            ("bert", span, span | pooler, head),
            ("qwen3_next", qwen, qwen | {"mtp.fc.weight": np.ones((24, 48), np.float32)}, {}),
            ("llama", llama, llama | angles | {"lm_head.weight": llama["model.embed_tokens.weight"] + 0}, TIED),
        )
    ):
        source = open_source(write_model(tmp_path / str(number), kind, further, **settings))
        assert not source.weights.fresh
        assert_same({name: source.weights.read(name) for name in tensors}, tensors)


def test_several_files(tmp_path: Path) -> None:
    """Sharded as save_pretrained does it; what is no index or is not there is refused."""
    tensors = random_tensors("gpt2")
    folder = write_model(tmp_path / "hf", "gpt2", tensors)
    (folder / "model.safetensors").unlink()
    shards = [f"model-{number}.safetensors" for number in range(2)]
    for number, shard in enumerate(shards):
        save_file({name: tensors[name] for name in sorted(tensors)[number::2]}, folder / shard)
    index = folder / "model.safetensors.index.json"
    weight_map = {name: shards[number % 2] for number, name in enumerate(sorted(tensors))}
    index.write_text(json.dumps({"weight_map": weight_map}))
    source = open_source(folder)
    assert_same({name: source.weights.read(name) for name in tensors}, tensors)

    (folder / shards[1]).rename(tmp_path / "gone")
    with pytest.raises(UserError, match=r"model-1\.safetensors: .*No such file"):
        open_source(folder)
    for text in ('{"weight_map": {"a": "../model-0.safetensors"}}', '{"weight_map": {"a": "b.bin"}}', "{}", "[", "[]"):
        index.write_text(text)
        with pytest.raises(UserError, match=r"index\.json: .*valid"):
            open_source(folder)


@pytest.mark.full
def test_without_the_order_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It and the pooler are what a run with this seed begins with, all else is what is there."""
    monkeypatch.setattr(state, "INIT_OPTIONS", {})  # with the tests' flags, another last bit; not with XLA's defaults
    left_out = ("bert.pooler", "cls.seq_relationship")
    whole = random_tensors("megatron-bert")
    tensors = {name: tensor for name, tensor in whole.items() if not name.startswith(left_out)}
    write_model(
        tmp_path / "hf", "megatron-bert", tensors, architectures=["MegatronBertForMaskedLM"], initializer_range=0.3
    )
    source = open_source(tmp_path / "hf")
    assert list(source.weights.fresh) == ["the pooler", "the order head"]
    import_hf(source, tmp_path / "run")
    program = tiny_program(source.config)
    begun = jax.device_get(program.layout.canonical_weights(program.layout.init().params))["shared"]["head"]
    found = weights_of(source, source.config.seed)["shared"]["head"]
    assert np.abs(begun["order"]["weight"]).max() > 0.1
    for part in ("pooler", "order"):
        jax.tree.map(np.testing.assert_array_equal, found[part], begun[part])
    export_hf(tmp_path / "run", export_config(tmp_path / "run"), tmp_path / "back")
    back = tensors_in(tmp_path / "back")
    pooler = {"bert.pooler.dense.weight": np.ascontiguousarray(begun["pooler"]["dense"]["weight"].T)}
    assert_same({name: back[name] for name in [*tensors, *pooler]}, tensors | pooler)
