"""BERT's numbers, split over two devices, against BERT written plainly in numpy from the weights: both layer orders and
every head, with padding, rows of one segment, and missing texts to choose from.

Letters: B batch, T and S tokens, D model, F feed-forward, V vocabulary, C classes.
"""

import dataclasses

import numpy as np
import pytest
from plain import EMBEDDING, Plain, cross_entropy, linear
from tiny import drawn_params, tiny_config, tiny_program

from megajax.batch import IGNORED
from megajax.program.program import Program
from megajax.program.scoring import scores
from megajax.program.synthetic import random_batch
from megajax.program.train_step import train_step
from megajax.verify.run import drawn_state, drawn_weights

RATE = 0.2
HEAD = 0xFFFF_FFFE  # what the mask of the pooled token is drawn for


class NumpyBert(Plain):
    """BERT of both layer orders."""

    def finished(self, batch: dict) -> np.ndarray:
        """What the heads get, [B, T, D]; of a choice every text is a row of its own, in the masks a part of its row."""
        shared, length = self.weights["shared"], batch["length"]
        self.parts = length.shape[1:]
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
    "post": {"layer_order": "post"},  # whose layers are those of "classes", its head that of "pre"
    "classes": {"layer_order": "post", "head": "classes", "num_classes": 3},
    "span": {"layer_order": "pre", "head": "span"},
    "choice": {"layer_order": "pre", "head": "choice", "num_classes": 4},
}


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=pytest.mark.full if kind == "post" else []) for kind in KINDS]
)
def program(request: pytest.FixtureRequest) -> Program:
    config = tiny_config(
        (1, 1, 2),
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
    weights = drawn_weights(program)
    state = program.layout.from_canonical(drawn_state(program))
    placed = program.put_batch(batch, program.local_rows)
    metrics = train_step(program)(state, placed)[1]
    expected = NumpyBert(program.config, weights, RATE, 0).scores(batch)
    means = {name: loss.sum() / (hit != IGNORED).sum() for name, (loss, hit) in expected.items()}
    if len(means) > 1:
        for name, mean in means.items():
            assert float(metrics[f"loss/{name}"]) == pytest.approx(mean, rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(sum(means.values()), rel=1e-5)
    name = next(name for name in expected if name != "masked_lm")
    _, hit_B = expected[name]
    assert float(metrics[f"accuracy/{name}"]) == pytest.approx(hit_B[hit_B != IGNORED].mean(), rel=1e-6)
    plain = NumpyBert(program.config, weights, 0.0, 0).scores(batch)
    assert all(abs(plain[name][0].sum() / expected[name][0].sum() - 1) > 1e-3 for name in plain)


def test_scores_are_numpy_s_without_dropout(program: Program, batch: dict) -> None:
    """Of every target; whatever stands in the padding, but of a span, whose end may lie there."""
    place_T = np.arange(program.config.model.sequence_length)
    padded = np.where(
        place_T < batch["length"][..., None], batch["tokens"], np.int32(0 if "span" in program.form.targets else 9)
    )
    placed = program.put_batch(batch | {"tokens": padded}, program.local_rows)
    found = scores(program)(drawn_params(program), placed)
    expected = NumpyBert(program.config, drawn_weights(program), 0.0, 0).scores(batch)
    assert found.keys() == expected.keys()
    for name, (loss, hit) in expected.items():
        np.testing.assert_allclose(np.asarray(found[name][0]), loss, rtol=1e-4, atol=1e-4, err_msg=name)
        np.testing.assert_array_equal(np.asarray(found[name][1]), hit, err_msg=name)
