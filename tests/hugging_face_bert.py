"""Small BERTs in Hugging Face's format: written by hand, or by transformers; and both heads' logits of ours."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from hugging_face import write_folder
from jax import Array
from jax.sharding import PartitionSpec
from jax.stages import Wrapped

from megajax.axes import ROW_AXES
from megajax.models.config import ModelConfig
from megajax.parallel.collectives import complete
from megajax.pipeline.ends import Microbatch
from megajax.program.bind import forward_pipeline
from megajax.program.program import BATCH, Program, vocabulary_axes

TYPES = {"pre": "megatron-bert", "post": "bert"}
CLASSES = {"pre": "MegatronBertForPreTraining", "post": "BertForPreTraining"}
TASK_CLASSES = {  # by our head
    "classes": "BertForSequenceClassification",
    "span": "BertForQuestionAnswering",
    "choice": "BertForMultipleChoice",
}
SETTINGS = {
    "vocab_size": 101,
    "max_position_embeddings": 24,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def class_of(order: str, head: str) -> str:
    """The class of a layer order with a head of ours."""
    return CLASSES[order] if head == "pretraining" else {"pre": "Megatron", "post": ""}[order] + TASK_CLASSES[head]


def bert_tensors(
    order: str, settings: dict[str, Any] = SETTINGS, head: str = "pretraining", classes: int = 2
) -> dict[str, np.ndarray]:
    """Every tensor of a model; `classes` of the head classes."""
    size, inner, rng = settings["hidden_size"], settings["intermediate_size"], np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "bert.embeddings.word_embeddings.weight": (settings["vocab_size"], size),
        "bert.embeddings.position_embeddings.weight": (settings["max_position_embeddings"], size),
        "bert.embeddings.token_type_embeddings.weight": (2, size),
    }
    pooler, norms = {"bert.pooler.dense": (size, size)}, []
    if head == "pretraining":
        shapes["cls.predictions.bias"] = (settings["vocab_size"],)
        norms = ["cls.predictions.transform.LayerNorm"]
    linear = {
        "pretraining": pooler | {"cls.seq_relationship": (2, size), "cls.predictions.transform.dense": (size, size)},
        "classes": pooler | {"classifier": (classes, size)},
        "span": {"qa_outputs": (2, size)},
        "choice": pooler | {"classifier": (1, size)},
    }[head]
    norms.append("bert.encoder.ln" if order == "pre" else "bert.embeddings.LayerNorm")
    for layer in range(settings["num_hidden_layers"]):
        start = f"bert.encoder.layer.{layer}."
        for name in "self.query", "self.key", "self.value", "output.dense":
            linear[f"{start}attention.{name}"] = (size, size)
        linear |= {f"{start}intermediate.dense": (inner, size), f"{start}output.dense": (size, inner)}
        own = ("attention.ln", "ln") if order == "pre" else ("attention.output.LayerNorm", "output.LayerNorm")
        norms += [start + name for name in own]
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    return {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def write_bert(
    folder: Path,
    order: str = "post",
    tensors: dict[str, np.ndarray] | None = None,
    *,
    without: Iterable[str] = (),
    **settings: Any,
) -> Path:
    """A folder with config.json and model.safetensors; `settings` are fields of config.json, `without` names some that
    it lacks."""
    fields = {"model_type": TYPES[order], "architectures": [CLASSES[order]]} | SETTINGS | settings
    return write_folder(folder, fields, bert_tensors(order) if tensors is None else tensors, without)


def peer_bert(model: ModelConfig, kind: str = "", **settings: Any) -> Any:
    """A BERT of `transformers`, of this class or with the model's head, whose random weights all matter; `settings` are
    further fields of config.json."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = {"pre": transformers.MegatronBertConfig, "post": transformers.BertConfig}[model.layer_order](
        vocab_size=model.vocab_size,
        max_position_embeddings=model.sequence_length,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        intermediate_size=model.mlp_size,
        initializer_range=0.2,
        attn_implementation="eager",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=model.num_classes,
        **settings,
    )
    peer = getattr(transformers, kind or class_of(model.layer_order, model.head))(config)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return peer


def both_logits(program: Program) -> Wrapped:
    """(params, batch) -> the masked tokens' logits [B, T, V], padded columns included, and the order's [B, C]."""
    axes = vocabulary_axes(program.config)

    def run(program: Program, params: Any, batch: Any) -> tuple[Array, Array]:
        pipeline = forward_pipeline(program, params, batch)

        def finish(x_BTD: Array, _: Microbatch) -> tuple[Array, Array]:
            return program.unsharded_model.ends(pipeline.ends.weights()).logits(x_BTD)

        found = pipeline.forward(program.forward_schedule, finish)
        specs = PartitionSpec(None, ROW_AXES, None, axes), PartitionSpec(None, ROW_AXES)
        masked, order = (complete(logits, spec) for logits, spec in zip(found, specs, strict=True))
        return masked.reshape(-1, *masked.shape[2:]), order.reshape(-1, 2)

    out = PartitionSpec(ROW_AXES, None, axes), PartitionSpec(ROW_AXES)
    return program.compiled(run, (program.layout.specs.params, BATCH), out)
