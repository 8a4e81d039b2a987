"""A BERT with the head of a task goes out and in again bit for bit, with its classes, and others can begin with it."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from canonical_weights import from_tensors, places_of
from hugging_face_bert import SETTINGS, TASK_CLASSES, bert_tensors, class_of, write_bert
from safetensors.numpy import load_file
from tiny import tiny_config, tiny_program

from megajax.config import Config, to_toml
from megajax.convert.exporting import export_config, export_hf
from megajax.convert.families import exchange_for
from megajax.convert.importing import import_hf, open_source
from megajax.convert.weights import to_tensors
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.init import first_state
from megajax.settings.presets import load_preset, resolve
from megajax.tasks.registry import TASKS, TaskConfig


def exported(run: Path, folder: Path) -> tuple[dict[str, np.ndarray], dict]:
    """The tensors of a run's newest checkpoint, and config.json."""
    export_hf(run, export_config(run), folder)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Bit for bit, under the same names."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.shape, tensor.tobytes()) == (expected[name].shape, expected[name].tobytes()), name


def written(folder: Path, order: str, head: str, classes: int = 2, **settings: object) -> dict[str, np.ndarray]:
    """The tensors of a folder that is written, in which numbers name the classes if nothing does."""
    tensors = bert_tensors(order, SETTINGS, head, classes)
    settings = {"num_labels": classes} | settings
    write_bert(folder, order, tensors, architectures=[class_of(order, head)], **settings)
    return tensors


def fine_tuned(order: str, task: str, mesh: tuple[int, int, int] = (1, 1, 1), **fields: object) -> Config:
    """A configuration of a task, of the model that `written` writes."""
    sizes = {"num_layers": 2, "num_heads": 4, "sequence_length": 24, "dropout": 0.0}
    head = {"head": TASKS[task].head, "num_classes": TASKS[task].classes}
    config = tiny_config(mesh, family="bert", layer_order=order, **sizes, **head)
    return dataclasses.replace(config, task=TaskConfig(name=task), **fields)


@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize(("head", "classes"), [("classes", 2), ("classes", 5), ("span", 2), ("choice", 4)])
def test_weights_and_settings(order: str, head: str, classes: int, tmp_path: Path) -> None:
    """All weights are read, those of the head where they belong, and turned to the identical tensors; config.json has
    the class and its labels."""
    tensors = written(tmp_path / "hf", order, head, 2 if head == "choice" else classes)
    source = open_source(tmp_path / "hf")
    model = source.config.model
    assert (model.layer_order, model.head, model.num_classes) == (order, head, classes) and not source.weights.fresh
    weights = source.weights.canonical(0)
    output, name = weights["shared"]["head"]["output"], "qa_outputs" if head == "span" else "classifier"
    np.testing.assert_array_equal(output["weight"], tensors[f"{name}.weight"].T)
    np.testing.assert_array_equal(output["bias"], tensors[f"{name}.bias"])
    assert_same(to_tensors(places_of(model), weights, model), tensors)

    fields = exchange_for(model, "", "").settings(model, (), None)["config.json"]
    assert fields["architectures"] == [class_of(order, head)]
    assert fields["id2label"] == {str(n): f"LABEL_{n}" for n in range(classes)}
    assert fields["label2id"] == {f"LABEL_{n}": n for n in range(classes)}
    assert fields.get("problem_type") == ("single_label_classification" if head == "classes" else None)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(fields))
    assert open_source(tmp_path / "hf").config == source.config


_full = pytest.mark.full
_TASKS = [
    ("mnli", "pre", ["entailment", "neutral", "contradiction"]),
    pytest.param("qqp", "post", ["0", "1"], marks=_full),
    pytest.param("squad2", "post", ["LABEL_0", "LABEL_1"], marks=_full),
    pytest.param("race", "pre", ["A", "B", "C", "D"], marks=_full),
]


@pytest.mark.parametrize(("task", "order", "names"), _TASKS)
def test_a_run_of_a_task_goes_out_and_in(task: str, order: str, names: list[str], tmp_path: Path) -> None:
    """From (1, 2, 2) with the task's names of its classes; an import finds the same model and tensors."""
    config = fine_tuned(order, task, (1, 2, 2))
    layout, model = tiny_program(config).layout, config.model
    tensors = bert_tensors(order, SETTINGS, model.head, model.num_classes)
    checkpoints = Checkpoints(tmp_path / "run", layout, keep=1)
    weights = from_tensors(places_of(model), tensors.__getitem__, model)
    checkpoints.save(7, layout.from_canonical(layout.begin(weights)))
    checkpoints.close()
    (tmp_path / "run" / "config.toml").write_text(to_toml(config))
    found, fields = exported(tmp_path / "run", tmp_path / "hf")
    assert_same(found, tensors)
    assert fields["architectures"] == [class_of(order, model.head)]
    assert fields["id2label"] == {str(n): name for n, name in enumerate(names)}
    assert fields["label2id"] == {name: n for n, name in enumerate(names)}

    source = open_source(tmp_path / "hf", {"model.vocab_multiple": 64})
    assert source.config.model == dataclasses.replace(model, scan_layers="auto")
    for name, tensor in tensors.items():
        assert source.weights.read(name).tobytes() == tensor.tobytes(), name


def test_names_of_classes(tmp_path: Path) -> None:
    """As transformers writes them, in any order of the file; of two default ones it writes nothing; a span's pooler,
    which older versions wrote, is not read."""
    names = {"2": "contradiction", "0": "Entailment", "1": "neutral"}
    tensors = written(tmp_path / "three", "post", "classes", 3, id2label=names, num_labels=None)
    assert open_source(tmp_path / "three").config.model.num_classes == 3
    written(tmp_path / "two", "post", "classes", 2, num_labels=None, problem_type="single_label_classification")
    assert open_source(tmp_path / "two").config.model.num_classes == 2
    pooler = {name: tensor for name, tensor in tensors.items() if name.startswith("bert.pooler")}
    span = bert_tensors("post", SETTINGS, "span") | pooler
    write_bert(tmp_path / "span", "post", span, architectures=[TASK_CLASSES["span"]])
    assert open_source(tmp_path / "span").config.model.head == "span" and len(pooler) == 2


_OUTPUT = ["head.output.bias", "head.output.weight"]


@pytest.mark.parametrize(
    ("task", "fresh"),
    [
        ("qqp", _OUTPUT),
        *(pytest.param(*row, marks=_full) for row in (("mnli", []), ("race", _OUTPUT), ("squad1", _OUTPUT))),
    ],
)
def test_a_run_begins_with_an_imported_one(task: str, fresh: list[str], tmp_path: Path) -> None:
    """It has all weights where the answers are the same ones; where they are not, those but the outputs."""
    tensors = written(tmp_path / "hf", "post", "classes", 3)
    source = open_source(tmp_path / "hf", {"model.vocab_multiple": 64})
    import_hf(source, tmp_path / "run")
    preset = resolve(load_preset(tmp_path / "run" / "config.toml"))
    assert preset.model == source.config.model and preset.pretrains
    config = fine_tuned("post", task, init=str(tmp_path / "run"))
    program = tiny_program(config)
    state, told = first_state(program)
    assert told == f"weights: of step 0 of {tmp_path / 'run'}, fresh {', '.join(fresh) or 'none'}"
    expected = {name: tensor for name, tensor in tensors.items() if not fresh or not name.startswith("classifier")}
    if config.model.head == "span":
        expected = {name: tensor for name, tensor in expected.items() if not name.startswith("bert.pooler")}
    canonical = jax.device_get(program.layout.canonical_weights(state.params))
    found = to_tensors(places_of(config.model), canonical, config.model)
    outputs = [found.pop(name) for name in list(found) if name not in expected]
    assert len(outputs) == len(fresh) and all(0 < np.abs(output).sum() < 5 for output in outputs if output.ndim == 2)
    assert_same(found, expected)
