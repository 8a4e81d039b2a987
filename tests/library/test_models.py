"""The library's models: on one device without a mesh; what they refuse; their tokenizer, that of their
weights, whatever they are trained on afterwards. docs/library.md, its blocks run in order as they are written."""

import dataclasses
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import tiny_config, user_error

import megajax
from megajax.core.batch import BatchArray, BatchSpec
from megajax.core.models.lora_config import LoraConfig
from megajax.core.program.program import Program, batch_form
from megajax.core.program.state import TrainState
from megajax.data.text.tokenizers import load_tokenizer, train_tokenizer
from megajax.library import beginning
from megajax.settings.config import Config
from megajax.training.batches import batch_of, inputs_of

IDS = np.random.default_rng(0).integers(0, 101, (3, 9), np.int32)


@pytest.mark.slow
def test_a_plain_model_is_a_function_of_plain_arrays() -> None:
    """The loss is the mean cross-entropy of its logits, and a step against its gradient lowers it."""
    plain = megajax.PlainModel(tiny_config(num_layers=2))
    weights = plain.init()
    logits_BTV = np.asarray(jax.jit(plain)(weights, IDS[:, :-1]), np.float64)
    assert logits_BTV.shape == (3, 8, 101)
    log_sums_BT = np.log(np.exp(logits_BTV).sum(axis=-1))
    targets_BT = np.take_along_axis(logits_BTV, IDS[:, 1:, None].astype(np.int64), axis=-1)[..., 0]
    both = jax.jit(jax.value_and_grad(plain.loss))
    loss, gradients = both(weights, IDS)
    assert float(loss) == pytest.approx((log_sums_BT - targets_BT).mean(), rel=1e-6)
    lower = jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, gradients)
    assert float(both(lower, IDS)[0]) < float(loss)


@pytest.mark.slow
def test_a_model_in_memory_uses_the_average_as_one_from_files_does(tmp_path: Path) -> None:
    model, run = megajax.init(tiny_config(num_layers=1, ema=0.5, optimizer={"warmup_steps": 0})), tmp_path / "run"
    before = model.weights()
    model.train_step(np.random.default_rng(1).integers(0, 101, (8, 17), np.int32))
    model.save(run)
    trained = megajax.restore(run, {"train.ema": 0}, training=True)
    average = jax.tree.map(lambda old, new: (old + new) / 2, before, trained.weights())
    plain = megajax.PlainModel(model.config).loss
    for each in (model, megajax.restore(run), megajax.restore(run, training=True)):
        assert [each.loss(IDS), plain(each.weights(), IDS)] == pytest.approx([float(plain(average, IDS))] * 2, rel=1e-6)
    assert abs(trained.loss(IDS) - model.loss(IDS)) > 1e-3


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([[1, 2], [3]], r"lists of different lengths; valid: token ids \[B, T \+ 1\]"),
        ([1, 2, 3], r"ids of shape \[3\]; valid"),
        (np.ones((1, 18), np.int32), r"ids of shape \[1, 18\]; valid: .*, T at most 16"),
        ([[1, 101]], "an id 101; valid: .*from 0 to 100"),
        ([[2**32 + 5, 1]], "an id 4294967301; valid"),
        (np.array([[2**64 - 1, 1]], np.uint64), "an id 18446744073709551615; valid"),
        ({"tokens": [[2**32, 1]], "targets": [[1, 1]]}, "tokens with the number 4294967296; valid"),
        ({"tokens": 5, "targets": 5}, r"tokens of shape \[\]; valid"),
        ({"tokens": np.ones((0, 2), int), "targets": np.ones((0, 2), int)}, r"tokens of shape \[0, 2\]; valid"),
        ({"tokens": [[1]], "targets": [[1]], 7: [[1]], "more": [[1]]}, "a batch with 7, more; valid"),
        ([[0.5, 1.0]], "numbers of the type float64; valid"),
        ({"tokens": [[1, 2]]}, r"a batch without targets; valid: tokens \[B, tokens\]"),
    ],
)
def test_what_is_no_batch_is_told_in_one_line(given, problem: str) -> None:
    config = tiny_config()
    with pytest.raises(megajax.UserError, match=problem):
        batch_of(config, batch_form(config), given)


def test_arrays_of_token_ids_are_in_the_vocabulary() -> None:
    form = BatchSpec(dict.fromkeys(("tokens", "more"), BatchArray(("tokens",), -1, ids=True)), {})
    said = user_error(batch_of, tiny_config(), form, {"tokens": [[1, 2]], "more": [[-1, 101]]})
    assert said == "more with the number 101; valid: from -1 to 100"


@pytest.mark.parametrize(
    "words", [{}, {"family": "bert"}, *({"family": "bert", "head": head} for head in ("classes", "span", "choice"))]
)
def test_every_array_has_a_smallest_and_a_largest_number(words: dict[str, str]) -> None:
    """What is padding is one of them."""
    config = tiny_config(**words)
    form = batch_form(config)
    batch = form.padding(2, tokens=16)
    assert batch_of(config, form, batch).keys() == batch.keys()
    for name in batch:
        for number in (-2, max(16, config.model.vocab_size) + 1):
            said = user_error(batch_of, config, form, batch | {name: np.full_like(batch[name], number)})
            assert f"{name} with the number {number}; valid: from" in said


def test_ids_that_are_traced_are_not_compared() -> None:
    config = tiny_config()
    ids = jax.eval_shape(lambda ids: batch_of(config, batch_form(config), ids)["tokens"], np.full((1, 3), 999))
    assert (ids.shape, ids.dtype) == ((1, 2), np.int32)


def test_ids_are_for_models_of_text() -> None:
    config = tiny_config(family="bert", norm_epsilon=1e-12)
    with pytest.raises(megajax.UserError, match=r"ids for a model of --model.family bert; valid: a batch"):
        inputs_of(config, batch_form(config), [[1, 2]])
    with pytest.raises(megajax.UserError, match="a batch without length, token_types; valid: "):
        inputs_of(config, batch_form(config), {"tokens": [[1, 2]]})


def test_what_a_model_cannot_do_says_what_is_valid() -> None:
    config = tiny_config(num_layers=1)
    model = megajax.Model(config, Program.on(config, jax.devices()[:1]), {}, 0, None)  # restored without the optimizer
    trained = megajax.Model(model.config, model.program, TrainState({}, *[None] * 5), 0, None)
    train = dataclasses.replace(config.train, steps=0, epochs=1.0)
    optimizer = dataclasses.replace(config.optimizer, decay_steps=0)
    endless = dataclasses.replace(config, train=train, optimizer=optimizer)
    untrained = megajax.Model(endless, megajax.make_program(endless), trained._weights, 0, None)
    for function, problem in (
        (lambda: model.train_step(IDS), r"train_step: .*; valid: restore\(…, training=True\)"),
        (lambda: trained.train_step(IDS), r"train_step: ids of shape \[3, 9\]; valid: \[8, 17\], train\."),
        (lambda: untrained.train_step(IDS), r"train_step: train.epochs .*; valid: train.steps"),
        (lambda: trained.train_step([[1, 2], [3]]), "lists of different lengths; valid: "),
        (lambda: model.save("anywhere"), r"save: .*; valid: restore\(…, training=True\)"),
        (lambda: model.generate("a text"), r"no tokenizer; valid: tokenizer.path"),
        (lambda: model.generate(["a text", [1]]), r"no tokenizer; valid"),
        (lambda: model.generate([[]]), "prompt 1 has 0 tokens.*; valid: 1 to 16"),
        (lambda: model.generate([[101]]), "prompt 1 has 1 tokens, or invalid ids; valid: .*0 to 100"),
        (lambda: model.generate([1, 2, 3]), "prompt 1 is neither text nor a list of token ids; valid: 1 to 16"),
        (lambda: model.generate([[1], [1.5]]), "prompt 2 is neither text nor a list of token ids; valid"),
        (lambda: model.generate(5), "prompts 5; valid: a text"),
        (lambda: model.generate([[1]], top_q=1), "no option 'top_q'; valid: batch, logprobs"),
        (lambda: model.generate([[1]], stop="x"), r"no tokenizer; valid: tokenizer.path"),
        (lambda: model.generate([[1]], stop=["x", ""]), "stop .*; valid: one character or more"),
        (lambda: model.evaluate("text.txt"), "no tokenizer; valid"),
        (lambda: megajax.evaluate("run", "perplexty"), "task 'perplexty'; valid: .*perplexity"),
        (lambda: megajax.restore("gs://bucket/run"), "gs:// is only for texts .*; valid: a path on a file system"),
        (lambda: megajax.load_preset("demo", ["x"]), r"overrides \['x'\]; valid: values by key, such as {\"train"),  # type: ignore[arg-type]
        (lambda: megajax.init(dataclasses.replace(config, simulate_devices=3)), "--simulate-devices 3: JAX was used"),
    ):
        with pytest.raises(megajax.UserError, match=problem):
            function()


def test_a_continuation_ends_where_the_tokenizer_of_its_time_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """`batches` gives a model its tokenizer, also after it has generated."""
    made: list[tuple] = []
    monkeypatch.setattr("megajax.library.model.Decoder", lambda *given, **how: made.append(given) or Silent())
    config = tiny_config(num_layers=1)
    model = megajax.Model(config, Program.on(config, jax.devices()[:1]), {}, 0, None)
    for ends in ([], [7], [7], [7, 9]):
        model.tokenizer = SimpleNamespace(ends=ends) if ends else None  # type: ignore[assignment]
        model.generate([[1, 2]])
    with pytest.raises(megajax.UserError, match=r"a prompt contains half a character .*; valid: text"):
        model.generate(["a", "\ud800"])
    assert [sorted(given[-1]) for given in made] == [[], [7], [7, 9]]


class Silent:
    def stream(self, ids: object, **options: object) -> list[object]:
        return []

    def renew(self, params: object) -> None:
        pass


TEXT = "\n\n".join(f"The quick brown fox jumps over {number} lazy dogs." for number in range(60))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a run keeps beside its weights. These are none: they are restored in tests/commands/test_init.py."""
    run = tmp_path / "run"
    train_tokenizer(["sphinx of black quartz, judge my vow " * 20], 280, "bpe").save(run / "data" / "tokenizer")
    monkeypatch.setattr(beginning, "check_first_weights", lambda config: None)
    monkeypatch.setattr(beginning, "first_state", lambda config, program: ({}, ""))
    return run


def config_of(tmp_path: Path, **others: object) -> Config:
    (tmp_path / "text.txt").write_text(TEXT)
    config = tiny_config(num_layers=1, vocab_size=300, global_batch=1)
    data = dataclasses.replace(config.data, path=str(tmp_path / "text.txt"))
    return dataclasses.replace(config, data=data, **others)


def test_of_the_run_whose_weights_a_model_begins_with(run: Path, tmp_path: Path) -> None:
    """Its data is tokenized with that as well, and with no other."""
    theirs, config = load_tokenizer(run / "data" / "tokenizer"), config_of(tmp_path, init=str(run))
    model = megajax.init(config)
    assert model.tokenizer == theirs
    batch = next(model.batches(tmp_path / "tokens"))
    assert model.tokenizer == theirs == load_tokenizer(tmp_path / "tokens" / "tokenizer")
    assert theirs.decode(np.ravel(batch["tokens"])) in f"{TEXT}<|endoftext|>{TEXT}"
    next(model.batches(tmp_path / "tokens"))  # found as it was made
    train_tokenizer([TEXT], 290, "bpe").save(tmp_path / "other")
    config = dataclasses.replace(config, tokenizer=dataclasses.replace(config.tokenizer, path=str(tmp_path / "other")))
    with pytest.raises(megajax.UserError, match=r"other: not the tokenizer of --init .*run; valid: that one, or none"):
        megajax.init(config)
    model.tokenizer = load_tokenizer(tmp_path / "other")
    with pytest.raises(megajax.UserError, match=r"tokenizer of the model: not the tokenizer in .*; valid: another fol"):
        model.batches(tmp_path / "tokens")


def test_a_run_without_one(run: Path, tmp_path: Path) -> None:
    model = megajax.init(config_of(tmp_path, init=str(tmp_path / "none")))
    assert model.tokenizer is None
    with pytest.raises(megajax.UserError, match=r"--init .*none has no tokenizer; valid: --tokenizer\.path"):
        model.batches(tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()


def test_adapters_and_references_of_fresh_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(megajax.UserError, match=r"--task.name preferences without --init: .*; valid: --init"):
        megajax.init(megajax.load_preset("finetune/preferences-demo", {"data.train": ["pairs.jsonl"]}))
    with pytest.raises(megajax.UserError, match=r"--lora.rank 2 without --init: .*; valid: --init"):
        megajax.init(config_of(tmp_path, lora=LoraConfig(rank=2)))


ROOT = Path(__file__).parents[2]
SMALL = {  # the demo's model would take minutes here
    **{"model.num_layers": 2, "model.hidden_size": 16, "model.num_heads": 2, "model.sequence_length": 16},
    **{"model.vocab_size": 270, "model.vocab_multiple": 16, "optimizer.warmup_steps": 1, "precision": "fp32"},
}


def python_blocks(page: Path) -> list[str]:
    parts = page.read_text().split("```python\n")[1:]
    return [part.partition("```")[0] for part in parts]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, and presets cut small."""
    monkeypatch.chdir(tmp_path)
    sentences = [f"The quick brown fox jumps over {number} lazy dogs." for number in range(120)]
    (tmp_path / "corpus.txt").write_text("\n\n".join(sentences))
    load = megajax.load_preset
    monkeypatch.setattr(megajax, "load_preset", lambda name, given: load(name, SMALL | given), raising=False)
    return tmp_path


@pytest.mark.full  # half a minute of compiling
def test_the_page(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = python_blocks(ROOT / "docs" / "library.md")
    assert len(blocks) == 3 and len(blocks[0].splitlines()) <= 10
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/library.md", "exec"), names)
    out = capsys.readouterr().out
    model, again, plain, ids = names["model"], names["again"], names["plain"], names["ids"]
    assert isinstance(model, megajax.Model) and isinstance(plain, megajax.PlainModel)
    assert again.step == 4 and model.step == 3  # type: ignore[attr-defined]
    logits = np.asarray(model.logits(ids))
    assert logits.shape == (*ids.shape, 270) and str(logits.shape) in out, out  # type: ignore[attr-defined]
    np.testing.assert_allclose(np.asarray(plain(model.weights(), ids)), logits, atol=1e-5)
    assert float(plain.loss(model.weights(), ids)) == pytest.approx(model.loss(ids), rel=1e-6)


@pytest.mark.full
def test_the_page_of_ones_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(python_blocks(ROOT / "docs" / "own.md")[0], "docs/own.md", "exec"), names)
    out, model = capsys.readouterr().out, names["model"]
    assert isinstance(model, megajax.Model) and model.step == 20 and "loss confident" in out
    told = [line.split() for line in out.splitlines() if line[:1].isdigit()]
    assert [int(words[0]) for words in told] == [*range(1, 21)] and float(told[-1][1]) < float(told[0][1])


def test_ones_own_mistake_is_shown_without_our_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's line, that which raises, and none of JAX's notes."""
    for filtering, shown in (("", range(2, 3)), ("off", range(4, 10))):
        monkeypatch.setenv("JAX_TRACEBACK_FILTERING", filtering)
        with pytest.raises(megajax.UserError, match=r"did you mean train\.steps") as caught:
            megajax.load_preset("demo", {"train.stepps": 1})
        assert len(traceback.extract_tb(caught.tb)) in shown and caught.value.__cause__ is None


def test_what_is_offered() -> None:
    """Every name, by the place that type checkers read as well; no JAX before one is used."""
    script = (
        "import sys, megajax\n"
        "assert 'jax' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert set(megajax.__all__) <= set(dir(megajax)) and megajax.UserError is not None\n"
        "assert 'jax' not in sys.modules\n"
        "assert not hasattr(megajax, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    for name in megajax.__all__:
        assert getattr(megajax, name).__doc__, name
