"""BERT's numbers, split over two devices, against BERT written plainly in numpy from the weights: both layer orders,
with padding, and rows of one segment.

Letters: B batch, T and S tokens, D model, F feed-forward, V vocabulary, C classes.
"""

import dataclasses

import numpy as np
import pytest
from plain import EMBEDDING, Plain, cross_entropy, linear, place, random_weights
from scipy.special import erf
from tiny import tiny_config, tiny_program

from megajax.batch import IGNORED
from megajax.program.program import Program
from megajax.program.scoring import scores
from megajax.program.synthetic import random_batch
from megajax.program.train_step import train_step

QUICKLY = {"xla_backend_optimization_level": 0}  # compile with little optimisation of the machine code
RATE = 0.2


class NumpyBert(Plain):
    """BERT of both layer orders."""

    epsilon = 1e-12

    @staticmethod
    def activation(x: np.ndarray) -> np.ndarray:
        return x / 2 * (1 + erf(x / np.sqrt(2)))

    def logits(self, batch: dict) -> tuple[np.ndarray, np.ndarray]:
        """Of every token, [B, T, V], and of the order of two segments, [B, C]."""
        shared, tokens_BT = self.weights["shared"], batch["tokens"]
        places_T = np.arange(tokens_BT.shape[1])
        x_BTD = shared["table"][tokens_BT] + shared["token_types"][batch["token_types"]] + shared["positions"][places_T]
        post = self.config.model.layer_order == "post"
        x_BTD = self.dropped(self.norm(shared["norm"], x_BTD) if post else x_BTD, EMBEDDING)
        seen_B1S = (places_T < batch["length"][:, None])[:, None]
        for layer in range(self.config.model.num_layers):
            x_BTD = (self.post_layer if post else self.pre_layer)(self.block(layer), x_BTD, seen_B1S, layer)
        x_BTD = x_BTD if post else self.norm(shared["norm"], x_BTD)
        masked, pair = shared["masked"], shared["pair"]
        y_BTD = self.norm(masked["norm"], self.activation(linear(masked["dense"], x_BTD)))
        logits_BTV = (y_BTD @ shared["table"].T + masked["bias"])[..., : self.config.model.vocab_size]
        return logits_BTV, linear(pair["output"], np.tanh(linear(pair["pooler"], x_BTD[:, 0])))

    def pre_layer(self, block: dict, x_BTD: np.ndarray, seen_B1S: np.ndarray, layer: int) -> np.ndarray:
        normal_BTD = self.norm(block["attention_norm"], x_BTD)
        x_BTD = x_BTD + self.attention(block["attention"], normal_BTD, seen_B1S, layer)
        return x_BTD + self.mlp(block["mlp"], self.norm(block["mlp_norm"], x_BTD), layer)

    def post_layer(self, block: dict, x_BTD: np.ndarray, seen_B1S: np.ndarray, layer: int) -> np.ndarray:
        y_BTD = self.attention(block["attention"], x_BTD, seen_B1S, layer)
        x_BTD = self.norm(block["attention_norm"], x_BTD + y_BTD)
        return self.norm(block["mlp_norm"], x_BTD + self.mlp(block["mlp"], x_BTD, layer))

    def scores(self, batch: dict) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """For both losses by name: of every target its cross-entropy, and whether it is found."""
        found = {}
        masked_BTV, order_BC = self.logits(batch)
        masked_BMV = np.take_along_axis(masked_BTV, batch["places"][..., None], 1)
        for name, logits, targets in (
            ("masked_lm", masked_BMV, batch["targets"]),
            ("sentence_order", order_BC, batch["order"]),
        ):
            hit = np.where(targets == IGNORED, IGNORED, logits.argmax(-1) == targets)
            found[name] = cross_entropy(logits, targets), hit
        return found


@pytest.fixture(scope="module", params=["pre", "post"])
def program(request: pytest.FixtureRequest) -> Program:
    config = tiny_config(
        (1, 1, 2),
        family="bert",
        layer_order=request.param,
        num_layers=2,
        sequence_length=12,
        microbatch=4,
        dropout=RATE,
    )
    return tiny_program(dataclasses.replace(config, seed=5))


@pytest.fixture(scope="module")
def batch(program: Program) -> dict:
    batch = random_batch(program.config, 3)
    assert (batch["length"] < 12).any() and (batch["order"] == IGNORED).any() and (batch["order"] == 1).any()
    return batch


def test_losses_and_accuracy_are_numpy_s(program: Program, batch: dict) -> None:
    """Of a train step, with dropout at its four sites."""
    layout, weights = program.layout, random_weights(program)
    state, placed = layout.from_natural(layout.begin(weights)), program.put_batch(batch, program.local_rows)
    metrics = train_step(program).lower(state, placed).compile(QUICKLY)(state, placed)[1]
    expected = NumpyBert(program.config, weights, RATE, 0).scores(batch)
    means = {name: loss.sum() / (hit != IGNORED).sum() for name, (loss, hit) in expected.items()}
    for name, mean in means.items():
        assert float(metrics[f"loss/{name}"]) == pytest.approx(mean, rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(sum(means.values()), rel=1e-5)
    _, hit_B = expected["sentence_order"]
    assert float(metrics["accuracy/sentence_order"]) == pytest.approx(hit_B[hit_B != IGNORED].mean(), rel=1e-6)
    plain = NumpyBert(program.config, weights, 0.0, 0).scores(batch)
    assert abs(plain["masked_lm"][0].sum() / expected["masked_lm"][0].sum() - 1) > 1e-3


def test_scores_are_numpy_s_without_dropout(program: Program, batch: dict) -> None:
    """Of every target; whatever stands in the padding."""
    weights = random_weights(program)
    place_T = np.arange(program.config.model.sequence_length)
    padded = np.where(place_T < batch["length"][:, None], batch["tokens"], np.int32(9))
    params = place(program, weights)
    placed = program.put_batch(batch | {"tokens": padded}, program.local_rows)
    found = scores(program).lower(params, placed).compile(QUICKLY)(params, placed)
    expected = NumpyBert(program.config, weights, 0.0, 0).scores(batch)
    assert found.keys() == expected.keys()
    for name, (loss, hit) in expected.items():
        np.testing.assert_allclose(np.asarray(found[name][0]), loss, rtol=1e-4, atol=1e-4, err_msg=name)
        np.testing.assert_array_equal(np.asarray(found[name][1]), hit, err_msg=name)
