"""Models' numbers, on one device and split over several, against models in NumPy:
decoders, GPT-2 and those of other words, documents that share a sequence beside each of them alone; BERT, both layer
orders and every head, with padding, rows of one segment, and missing texts to choose from.

Letters: B batch, T and S tokens, D model, F feed-forward, V vocabulary, C classes.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest
from field import loss_and_exact_gradients
from model_in_numpy import EMBEDDING, Decoder, Transformer, cross_entropy, linear
from tiny import GEMMA, GPT_OSS, LINEAR, OLMO2, drawn_params, full, hash_of, tiny_config, tiny_program

from megajax.core.batch import IGNORED
from megajax.core.program.program import Program
from megajax.core.program.scoring import next_logits, scores
from megajax.core.program.train_step import loss_and_gradients, train_step
from megajax.data.synthetic import random_batch
from megajax.settings.config import Config
from megajax.verify.run import drawn_state, drawn_weights

STEP = 3

LLAMA = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "bias": "none"}
WORDS = {
    "gpt-2": {},
    "llama 3.1": LLAMA
    | {"num_kv_heads": 4, "head_size": 6, "mlp_size": 40, "tied_embedding": False, "rope_scaling": "llama3"}
    | {"rope_factor": 8.0, "rope_original_length": 64, "rope_theta": 50.0},
    "qwen 3, window, yarn": LLAMA
    | {"num_kv_heads": 2, "head_size": 10, "query_key_norm": True, "norm_epsilon": 0.1, "sliding_window": 4}
    | {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 7, "rope_theta": 20.0}
    | {"rope_beta_fast": 1.1, "rope_beta_slow": 0.1, "attention_gate": "sigmoid", "rotary_size": 6},
    "qwen 2 of one head of keys": LLAMA
    | {"num_kv_heads": 1, "head_size": 4, "bias": "query-key-value", "rope_scaling": "linear", "rope_factor": 3.0},
    "olmo 2, normed over all heads": LLAMA
    | {"num_kv_heads": 2, "head_size": 6, "query_key_norm": True, "query_key_norm_over": "width", "norm_epsilon": 0.1},
    "gemma 3": GEMMA | {"num_kv_heads": 4, "head_size": 6, "rope_scaling": "linear", "rope_factor": 3.0},
    "olmo 3": OLMO2 | {"window_layers": "0,1,1", "rope_theta": 30.0},
    "gpt-oss without experts": LLAMA | GPT_OSS | {"num_kv_heads": 2, "head_size": 6, "sliding_window": 4},
    "gpt-2 without biases": {"bias": "none", "num_kv_heads": 4, "norm": "layernorm", "sliding_window": 5},
    "layernorm with swiglu": {"activation": "swiglu", "positions": "rotary", "head_size": 4, "query_key_norm": True},
}
DEFAULT = [("gpt-2", False), ("qwen 3, window, yarn", True)]  # any mesh is one device exactly (`test_field.py`)
OTHERS = [(name, documents) for name in WORDS for documents in (True, False) if (name, documents) not in DEFAULT]


def make_config(mesh: tuple[int, int, int], rate: float, **options) -> Config:
    size = {"num_layers": 3, "sequence_length": 12, "global_batch": 4, "microbatch": 2, "dropout": rate}
    size["init_std"] = 0.4  # so that every weight matters
    return dataclasses.replace(tiny_config(mesh, **size | options), seed=5)


def weights_of(program: Program) -> dict:
    """Biases of the size of weights, so that they matter as much."""

    def enlarged(path: tuple, leaf: np.ndarray) -> np.ndarray:
        return 10 * leaf if path[-1].key == "bias" else leaf

    return jax.tree_util.tree_map_with_path(enlarged, drawn_weights(program))


def params_of(program: Program) -> dict:
    return drawn_params(program, weights_of(program))


def losses(program: Program, *steps: int) -> list[float]:
    params = params_of(program)
    batch = program.put_batch(random_batch(program.config, STEP), program.local_rows)
    step_function = loss_and_gradients(program)
    run = jax.jit(lambda step: step_function(params, batch, step)[0])  # the backward pass is not compiled
    return [float(run(np.int32(step))) for step in steps]


def dropout(config: Config, rate: float, step: int = STEP, parts: tuple[int, ...] = ()) -> Callable[..., np.ndarray]:
    """By the masks of a step, which know a row of the batch by its sample and its part, if it has several."""

    def dropped(x: np.ndarray, *site: int) -> np.ndarray:
        if rate == 0:
            return x
        rows = x.reshape(-1, *parts, *x.shape[1:])
        grid = np.meshgrid(*map(np.arange, rows.shape), indexing="ij", sparse=True)
        row, others = grid[: 1 + len(parts)], grid[1 + len(parts) :]
        bits = hash_of(*(np.uint32(index) for index in (config.seed, step, *row, *site, *others)))
        return (rows * (np.asarray(bits) >= round(rate * 2**32)) / (1 - rate)).reshape(x.shape)

    return dropped


def expected_loss(program: Program, rate: float, **others) -> float:
    """The loss of numpy's model, or of one with other words."""
    config = dataclasses.replace(program.config, model=dataclasses.replace(program.config.model, **others))
    model = Decoder(config.model, weights_of(program), dropout(config, rate))
    return model.loss(random_batch(program.config, STEP))


@pytest.fixture(scope="module", params=[(1, 1, 2), full((2, 2, 2))], ids=str)
def gpt2(request: pytest.FixtureRequest) -> Program:
    """Three layers, also on two stages."""
    return tiny_program(make_config(request.param, 0.2))


@pytest.mark.parametrize(("name", "documents"), [*DEFAULT, *(full(*case) for case in OTHERS)])
def test_training_loss_is_numpy_s(gpt2: Program, name: str, documents: bool) -> None:
    """Dropout at its four sites included, whose masks are others in another step; those that are seldom tried on four
    devices of a tensor group, twice as many as one of them has heads of keys."""
    if (name, documents) == DEFAULT[0]:
        program = gpt2
    else:
        mesh = (1, 1, 1) if (name, documents) in DEFAULT else (2, 1, 4)
        program = tiny_program(make_config(mesh, 0.2, num_layers=2, reset_attention=documents, **WORDS[name]))
    loss, other = losses(program, STEP, STEP + 1)
    assert loss == pytest.approx(expected_loss(program, 0.2), rel=1e-5)
    assert abs(expected_loss(program, 0.0) / loss - 1) > 1e-4 < abs(other / loss - 1)
    others = {"rope_theta": 2.0} if program.config.model.rotary else {"sliding_window": 3}
    assert abs(expected_loss(program, 0.2, **others) / loss - 1) > 1e-4


def test_a_rate_of_zero_turns_all_dropout_off() -> None:
    """The loss is numpy's without dropout, the same to the bit in every step."""
    program = tiny_program(make_config((1, 1, 1), 0.0, num_layers=1))
    loss, other = losses(program, 0, STEP)
    assert loss == other == pytest.approx(expected_loss(program, 0.0), rel=1e-5)


def test_evaluation_is_numpy_s_without_dropout(gpt2: Program) -> None:
    """The loss of the targets, whatever the model's dropout."""
    batch = random_batch(gpt2.config, STEP)
    found = scores(gpt2)(params_of(gpt2), gpt2.put_batch(batch, gpt2.local_rows))
    loss_BT, hit_BT = found["next_token"]
    counted_BT = batch["targets"] != IGNORED
    np.testing.assert_array_equal(np.asarray(hit_BT) == IGNORED, ~counted_BT)
    assert np.asarray(loss_BT)[counted_BT].mean() == pytest.approx(expected_loss(gpt2, 0.0), rel=1e-5)


def test_next_logits_are_numpy_s_and_causal(gpt2: Program) -> None:
    """Logits at a position, to the bit the same with other tokens after it; padded columns are never sampled."""
    config = gpt2.config
    tokens = random_batch(config, STEP)["tokens"]
    params = params_of(gpt2)

    def logits(tokens: np.ndarray) -> np.ndarray:
        batch = gpt2.put_batch({"tokens": tokens, "targets": tokens}, gpt2.local_rows)
        return np.asarray(next_logits(gpt2)(params, batch, np.int32(7)))

    expected_BV = Decoder(config.model, weights_of(gpt2)).logits({"tokens": tokens})[:, 7]
    np.testing.assert_allclose(logits(tokens)[:, : config.model.vocab_size], expected_BV, rtol=1e-4, atol=1e-4)
    assert (logits(tokens)[:, config.model.vocab_size :] < -1e38).all()
    later, here = tokens.copy(), tokens.copy()
    later[:, 8:] = (later[:, 8:] + 1) % config.model.vocab_size
    here[:, 7] = (here[:, 7] + 1) % config.model.vocab_size
    np.testing.assert_array_equal(logits(later), logits(tokens))
    assert np.abs(logits(here) - logits(tokens)).max() > 0.1


LENGTH, VOCABULARY = 16, 101
ROWS = [[5, 1, 7, 3], [16], [2, 13, 1], [1, 8, 7]]  # lengths of the documents of every sequence
DOCUMENTS = [(row, sum(lengths[:n]), length) for row, lengths in enumerate(ROWS) for n, length in enumerate(lengths)]
TOKENS, TARGETS = np.random.default_rng(0).integers(0, VOCABULARY, (2, len(ROWS), LENGTH), np.int32)


def joined() -> dict[str, np.ndarray]:
    """Documents that share sequences, and where in its document every token stands."""
    positions = np.array([[place for length in lengths for place in range(length)] for lengths in ROWS], np.int32)
    return {"tokens": TOKENS, "targets": TARGETS, "positions": positions}


def alone() -> dict[str, np.ndarray]:
    """The same documents, each at the start of a sequence of its own, and a sequence without any."""
    tokens = np.full((len(DOCUMENTS) + 1, LENGTH), 7, np.int32)
    targets = np.full_like(tokens, IGNORED)
    for number, (row, start, length) in enumerate(DOCUMENTS):
        tokens[number, :length] = TOKENS[row, start : start + length]
        targets[number, :length] = TARGETS[row, start : start + length]
    return {"tokens": tokens, "targets": targets}


@pytest.mark.parametrize("words", [{}, LINEAR | {"linear_layers": "1,1"}])
def test_loss_and_gradients_are_those_of_each_document_alone(words: dict) -> None:
    """Of all weights, the learned positions included, exactly; on a mesh: `test_field.py`."""
    found = []
    for batch in joined(), alone():
        size = {"num_layers": 2, "global_batch": len(batch["tokens"])}
        config = tiny_config(dropout=0.0, reset_attention="positions" in batch, **size | words)
        found.append(loss_and_exact_gradients(config, batch))
    together, expected = found
    assert expected["shared/positions"].any(axis=(0, 1, 3)).all()
    for name, leaf in expected.items():
        assert np.array_equal(together[name], leaf), name


RATE = 0.2
HEAD = 0xFFFF_FFFE  # what the mask of the pooled token is drawn for


class NumpyBert(Transformer):
    """BERT of both layer orders."""

    def finished(self, batch: dict) -> np.ndarray:
        """What the heads get, [B, T, D]; of a choice every text is a row of its own, in the masks a part of its row."""
        shared, length = self.weights["shared"], batch["length"]
        tokens_BT, types_BT = (batch[name].reshape(-1, batch[name].shape[-1]) for name in ("tokens", "token_types"))
        places_T = np.arange(tokens_BT.shape[1])
        x_BTD = shared["table"][tokens_BT] + shared["token_types"][types_BT] + shared["positions"][places_T]
        post = self.model.layer_order == "post"
        x_BTD = self.dropped(self.norm(shared["norm"], x_BTD) if post else x_BTD, EMBEDDING)
        seen_B1S = (places_T < np.maximum(length.reshape(-1), 1)[:, None])[:, None]
        x_BTD = self.layers(x_BTD, seen_B1S)
        return x_BTD if post else self.norm(shared["norm"], x_BTD)

    def pooled(self, x_BTD: np.ndarray) -> np.ndarray:
        return np.tanh(linear(self.weights["shared"]["head"]["pooler"]["dense"], x_BTD[:, :1]))

    def logits(self, batch: dict) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
        """For every loss by name, logits and targets; of a span of its two ends."""
        x_BTD, shared = self.finished(batch), self.weights["shared"]
        head = shared["head"]
        if self.model.head == "span":
            logits_BT2 = linear(head["output"], x_BTD)
            return {"span": [(logits_BT2[..., 0], batch["start"]), (logits_BT2[..., 1], batch["end"])]}
        if self.model.head != "pretraining":
            logits_BC = linear(head["output"], self.dropped(self.pooled(x_BTD), HEAD)).reshape(len(batch["label"]), -1)
            if self.model.head == "choice":
                logits_BC = np.where(batch["length"] > 0, logits_BC, -1e30)
            return {self.model.head: [(logits_BC, batch["label"])]}
        y_BTD = self.norm(head["masked"]["norm"], self.gelu(linear(head["masked"]["dense"], x_BTD)))
        logits_BTV = (y_BTD @ shared["table"].T + head["masked"]["bias"])[..., : self.model.vocab_size]
        logits_BMV = np.take_along_axis(logits_BTV, batch["places"][..., None], 1)
        order_BC = linear(head["order"], self.pooled(x_BTD)[:, 0])
        return {"masked_lm": [(logits_BMV, batch["targets"])], "sentence_order": [(order_BC, batch["order"])]}

    def scores(self, batch: dict) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """For every loss by name: of every target its cross-entropy, and whether it is found."""
        found = {}
        for name, parts in self.logits(batch).items():
            hits = [np.where(targets == IGNORED, IGNORED, logits.argmax(-1) == targets) for logits, targets in parts]
            found[name] = np.mean([cross_entropy(*part) for part in parts], axis=0), np.min(hits, axis=0)
        return found


KINDS = {
    "pre": {"layer_order": "pre"},
    "post": {"layer_order": "post"},  # whose layers are those of "choice", its head that of "pre"
    "classes": {"layer_order": "post", "head": "classes", "num_classes": 3},
    "span": {"layer_order": "pre", "head": "span"},
    "choice": {"layer_order": "post", "head": "choice", "num_classes": 4},  # of classes a row has several texts
}


@pytest.fixture(scope="module", params=["pre", *map(full, ("post", "span", "choice", "classes"))])
def program(request: pytest.FixtureRequest) -> Program:
    config = tiny_config(
        (1, 1, 1) if request.param == "pre" else (1, 1, 2),
        family="bert",
        **KINDS[request.param],
        num_layers=2,
        sequence_length=12,
        microbatch=4,
        dropout=RATE,
        init_std=0.3,  # so that every weight matters
    )
    return tiny_program(dataclasses.replace(config, seed=5))


@pytest.fixture(scope="module")
def batch(program: Program) -> dict:
    batch = random_batch(program.config, 3)
    assert (batch["length"] < 12).any()
    for name in batch.keys() & {"order", "label", "start"}:
        assert (batch[name] == IGNORED).any() and (batch[name] > 0).any()
    return batch


def test_losses_and_accuracy_are_numpy_s(program: Program, batch: dict) -> None:
    """Of a train step, with dropout at its four sites."""
    weights = weights_of(program)
    state = program.layout.from_canonical(dataclasses.replace(drawn_state(program), params=weights))
    placed = program.put_batch(batch, program.local_rows)
    step = train_step(program)
    figures = "loss", "accuracy"  # which need no backward pass: it is not compiled
    metrics = jax.jit(lambda: {name: x for name, x in step(state, placed)[1].items() if name.startswith(figures)})()
    masks = dropout(program.config, RATE, 0, batch["length"].shape[1:])
    expected = NumpyBert(program.config.model, weights, masks).scores(batch)
    means = {name: loss.sum() / (hit != IGNORED).sum() for name, (loss, hit) in expected.items()}
    if len(means) > 1:
        for name, mean in means.items():
            assert float(metrics[f"loss/{name}"]) == pytest.approx(mean, rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(sum(means.values()), rel=1e-5)
    name = next(name for name in expected if name != "masked_lm")
    _, hit_B = expected[name]
    assert float(metrics[f"accuracy/{name}"]) == pytest.approx(hit_B[hit_B != IGNORED].mean(), rel=1e-6)
    without = NumpyBert(program.config.model, weights).scores(batch)
    assert all(abs(without[name][0].sum() / expected[name][0].sum() - 1) > 1e-3 for name in without)


def test_scores_are_numpy_s_without_dropout(program: Program, batch: dict) -> None:
    """Of every target; whatever stands in the padding, but of a span, whose end may lie there."""
    place_T = np.arange(program.config.model.sequence_length)
    padded = np.where(
        place_T < batch["length"][..., None], batch["tokens"], np.int32(0 if "span" in program.form.targets else 9)
    )
    placed = program.put_batch(batch | {"tokens": padded}, program.local_rows)
    found = scores(program)(params_of(program), placed)
    expected = NumpyBert(program.config.model, weights_of(program)).scores(batch)
    assert found.keys() == expected.keys()
    for name, (loss, hit) in expected.items():
        np.testing.assert_allclose(np.asarray(found[name][0]), loss, rtol=1e-4, atol=1e-4, err_msg=name)
        np.testing.assert_array_equal(np.asarray(found[name][1]), hit, err_msg=name)
