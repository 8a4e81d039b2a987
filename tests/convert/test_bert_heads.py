"""A BERT with the head of a task goes out and in again bit for bit, with its classes, and others can begin with it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hugging_face_bert import SETTINGS, TASK_CLASSES, bert_tensors, class_of, write_bert
from safetensors.numpy import load_file
from tiny import tiny_config, tiny_program

from megajax.config import Config, to_toml
from megajax.convert.bert import places
from megajax.convert.exporting import export_config, export_hf
from megajax.convert.importing import import_hf, open_source
from megajax.convert.weights import from_tensors
from megajax.presets import load_preset, resolve
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.init import first_state
from megajax.tasks.config import TaskConfig

LABELS = {f"LABEL_{n}": n for n in range(4)}


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


@pytest.mark.parametrize(
    ("order", "head", "classes"),
    [("pre", "classes", 3), ("post", "classes", 2), ("pre", "span", 2), ("post", "span", 2), ("post", "choice", 4)],
)
def test_import_then_export(order: str, head: str, classes: int, tmp_path: Path) -> None:
    """The identical tensors, the class and its number of labels; the run knows its head."""
    tensors = written(tmp_path / "hf", order, head, 2 if head == "choice" else classes)
    source = open_source(tmp_path / "hf")
    assert not source.weights.fresh
    output = source.weights.natural(0)["shared"]["head"]["output"]
    name = "qa_outputs" if head == "span" else "classifier"
    np.testing.assert_array_equal(output["weight"], tensors[f"{name}.weight"].T)
    np.testing.assert_array_equal(output["bias"], tensors[f"{name}.bias"])
    import_hf(source, tmp_path / "run")
    model = resolve(load_preset(tmp_path / "run" / "config.toml")).model
    assert (model.layer_order, model.head, model.num_classes) == (order, head, classes)

    back, fields = exported(tmp_path / "run", tmp_path / "back")
    assert_same(back, tensors)
    assert fields["architectures"] == [class_of(order, head)]
    assert fields["label2id"] == {name: n for name, n in LABELS.items() if n < classes}
    assert fields["id2label"] == {str(n): name for name, n in fields["label2id"].items()}
    assert fields.get("problem_type") == ("single_label_classification" if head == "classes" else None)
    assert open_source(tmp_path / "back").config == source.config


def run_of(folder: Path, order: str, task: str, mesh: tuple[int, int, int] = (1, 1, 1)) -> dict[str, np.ndarray]:
    """A run of a task at step 7; its tensors as transformers has them."""
    config = fine_tuned(order, task, mesh)
    layout = tiny_program(config).layout
    tensors = bert_tensors(order, SETTINGS, config.model.head, config.model.num_classes)
    checkpoints = Checkpoints(folder, layout, keep=1)
    weights = from_tensors(places(config.model), tensors.__getitem__, config.model)
    checkpoints.save(7, layout.from_natural(layout.begin(weights)))
    checkpoints.close()
    (folder / "config.toml").write_text(to_toml(config))
    return tensors


def fine_tuned(order: str, task: str, mesh: tuple[int, int, int] = (1, 1, 1), **fields: object) -> Config:
    sizes = {"num_layers": 2, "num_heads": 4, "sequence_length": 24, "dropout": 0.0}
    plain = tiny_config(mesh, family="bert", layer_order=order, **sizes)
    preset = {"model." + name: value for name, value in dataclasses.asdict(plain.model).items()}
    for name in "head", "num_classes":
        del preset[f"model.{name}"]
    model = resolve({**preset, "task.name": task, **REST}).model
    return dataclasses.replace(plain, model=model, task=TaskConfig(name=task), **fields)


REST = {"train.steps": 1, "train.global_batch": 1, "train.microbatch": 1, "optimizer.learning_rate": 1e-3} | {
    "optimizer.decay_steps": 1
}


@pytest.mark.parametrize(
    ("task", "order", "names"),
    [
        ("mnli", "pre", ["entailment", "neutral", "contradiction"]),
        ("qqp", "post", ["0", "1"]),
        ("squad2", "post", ["LABEL_0", "LABEL_1"]),
        ("race", "pre", ["A", "B", "C", "D"]),
    ],
)
def test_export_of_a_task_then_import(task: str, order: str, names: list[str], tmp_path: Path) -> None:
    """From (1, 2, 2): the task's names of its classes; what comes in again is what was in the run."""
    tensors = run_of(tmp_path / "run", order, task, (1, 2, 2))
    found, fields = exported(tmp_path / "run", tmp_path / "hf")
    assert_same(found, tensors)
    head = fine_tuned(order, task).model.head
    assert fields["architectures"] == [class_of(order, head)] and head in TASK_CLASSES
    assert fields["id2label"] == {str(n): name for n, name in enumerate(names)}
    assert fields["label2id"] == {name: n for n, name in enumerate(names)}
    source = open_source(tmp_path / "hf", {"model.vocab_multiple": 64})
    assert source.config.model == dataclasses.replace(fine_tuned(order, task).model, scan_layers="auto")
    for name, tensor in tensors.items():
        assert source.weights.read(name).tobytes() == tensor.tobytes(), name


def test_names_of_classes(tmp_path: Path) -> None:
    """As transformers writes them, in any order of the file; of two default ones it writes nothing; a span's pooler,
    which older versions wrote, is not read."""
    names = {"2": "contradiction", "0": "Entailment", "1": "neutral"}
    tensors = written(tmp_path / "three", "post", "classes", 3, id2label=names, num_labels=None)
    assert open_source(tmp_path / "three").config.model.num_classes == 3
    written(tmp_path / "two", "post", "classes", 2, num_labels=None, problem_type="single_label_classification")
    write_bert(tmp_path / "two", "post", bert_tensors("post", SETTINGS, "classes"), without=["num_labels"])
    fields = json.loads((tmp_path / "two" / "config.json").read_text()) | {"architectures": [TASK_CLASSES["classes"]]}
    (tmp_path / "two" / "config.json").write_text(json.dumps(fields))
    assert open_source(tmp_path / "two").config.model.num_classes == 2
    pooler = {name: tensor for name, tensor in tensors.items() if name.startswith("bert.pooler")}
    span = bert_tensors("post", SETTINGS, "span") | pooler
    write_bert(tmp_path / "span", "post", span, architectures=[TASK_CLASSES["span"]])
    assert open_source(tmp_path / "span").config.model.head == "span" and len(pooler) == 2


def test_a_run_begins_with_an_imported_one(tmp_path: Path) -> None:
    """All weights where the answers are the same ones; where they are not, of the head the pooler only."""
    tensors = written(tmp_path / "hf", "post", "classes", 3)
    import_hf(open_source(tmp_path / "hf", {"model.vocab_multiple": 64}), tmp_path / "run")
    output = ["head.output.bias", "head.output.weight"]
    for task, fresh in ("mnli", []), ("qqp", output), ("race", output), ("squad1", output):
        program = tiny_program(fine_tuned("post", task, init=str(tmp_path / "run"), seed=3))
        state, told = first_state(program)
        assert told == f"weights: of step 0 of {tmp_path / 'run'}, fresh {', '.join(fresh) or 'none'}"
        head = program.layout.natural_weights(state.params)["shared"]["head"]
        if task != "squad1":
            np.testing.assert_array_equal(head["pooler"]["dense"]["weight"], tensors["bert.pooler.dense.weight"].T)
        else:
            assert "pooler" not in head
        own = program.layout.natural_weights(program.layout.init().params)["shared"]["head"]["output"]["weight"]
        expected = own if fresh else tensors["classifier.weight"].T
        np.testing.assert_array_equal(head["output"]["weight"], expected)
