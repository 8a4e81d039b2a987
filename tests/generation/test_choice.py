"""The next token: top-k and top-p as numpy defines them, and draws that have the model's probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import full

from megajax.generation.choice import Sampling, choose, gumbel_noise, prompt_bits, seen_tokens

SIZE = 203


def logits(rows: int, spread: float = 2.0) -> np.ndarray:
    """Some of them equal, as half precision makes them."""
    return np.random.default_rng(0).normal(0, spread, (rows, SIZE)).astype(np.float16).astype(np.float32)


def allowed(row: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Which tokens may be chosen: sort by probability, cut after k, then where the sum has reached p, then what is too
    far below the first."""
    probability = np.exp(row.astype(np.float64) / sampling.temperature)
    order = np.argsort(-probability, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    share = probability[order] / probability[order].sum()
    kept, total = [], 0.0
    for token, part in zip(order, share, strict=True):
        kept.append(token)
        total += part
        if total >= sampling.top_p:
            break
    least = max(probability[kept].min(), sampling.min_p * probability.max())
    return probability >= least  # as probable as the last one may, too


def repeated(values: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens every row has, and its logits with the penalty for them."""
    seen = np.random.default_rng(1).random(values.shape) < 0.3
    penalized = np.where(values < 0, values * np.float32(penalty), values / np.float32(penalty))
    return seen, np.where(seen, penalized, values)


@pytest.mark.parametrize("temperature", [0.7, full(3.0)])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "penalty"),
    [
        (0, 1.0, 0.0, 1.0),
        (5, 1.0, 0.0, 1.5),
        (0, 0.6, 0.0, 1.0),
        (40, 0.9, 0.2, 0.7),
        (1, 0.5, 0.0, 1.0),
        (999, 0.01, 0.0, 1.0),
        (0, 1.0, 0.1, 1.2),
        (0, 1.0, 1.0, 1.0),
    ],
)
def test_the_choice_is_numpy_s(temperature, top_k, top_p, min_p, penalty):
    """The highest of the allowed logits plus noise, for each of many rows."""
    sampling, rows = Sampling(temperature, top_k, top_p, 5, min_p, penalty), 64
    values = logits(rows)
    seen, penalized = repeated(values, penalty)
    bits = prompt_bits([[row] for row in range(rows)], sampling.seed)
    position = np.arange(rows, dtype=np.int32)
    given = seen if sampling.penalizes else None
    chosen = np.asarray(jax.jit(choose, static_argnums=3)(values, bits, position, sampling, given))
    values = penalized
    noise = np.asarray(gumbel_noise(bits.fold(position), SIZE))
    for row in range(rows):
        may = allowed(values[row], sampling)
        noisy = np.where(may, values[row] / np.float32(temperature) + noise[row], -np.inf)
        assert chosen[row] == noisy.argmax() and may[chosen[row]]
        assert may.sum() >= min(top_k or SIZE, SIZE) if (top_p, min_p) == (1, 0) else may.any()


def test_without_temperature_the_first_of_the_most_probable():
    values = np.zeros((2, SIZE), np.float32)
    values[0, [7, 9]] = 3
    for seed in 0, 1:
        sampling = Sampling(0.0, top_k=3, top_p=0.1, seed=seed)
        chosen = choose(values, prompt_bits([[1], [2]], seed), np.zeros(2, np.int32), sampling)
        assert chosen.dtype == jnp.int32 and chosen.tolist() == [7, 0]
        seen = np.zeros((2, SIZE), bool)
        seen[0, [7, 9]] = True
        penal = Sampling(0.0, repetition_penalty=4.0)
        values[0, 50] = 1.0
        assert choose(values, prompt_bits([[1], [2]], seed), np.zeros(2, np.int32), penal, seen).tolist() == [50, 0]
        values[0, 50] = 0.0


def test_tokens_of_a_text_are_seen():
    """Those before its length, padding not."""
    tokens = np.array([[3, 1, 3, 0], [2, 2, 4, 4]], np.int32)
    seen = seen_tokens(tokens, np.array([3, 2], np.int32), 5)
    assert seen.tolist() == [[False, True, False, True, False], [False, False, True, False, False]]


def test_draws_have_the_softmax_s_probabilities():
    """Over many positions of one prompt; the chi-square statistic is near its degrees of freedom."""
    number, row = 40_000, np.linspace(-2, 2, 21).astype(np.float32)
    bits = jax.tree.map(lambda word: jnp.broadcast_to(word, (number,)), prompt_bits([[3, 1]], 2))
    values = jnp.broadcast_to(row, (number, len(row)))
    chosen = choose(values, bits, np.arange(number, dtype=np.int32), Sampling(1.0))
    expected = number * np.exp(row) / np.exp(row).sum()
    statistic = ((np.bincount(chosen, minlength=len(row)) - expected) ** 2 / expected).sum()
    assert 5 < statistic < 50  # 20 degrees of freedom: outside in one of 5,000 seeds


def test_noise_belongs_to_seed_and_prompt_not_to_the_order():
    """Equal prompts have different noise."""

    def states(prompts, seed) -> set[tuple[int, int]]:
        bits = prompt_bits(prompts, seed)
        return set(zip(np.asarray(bits.a).tolist(), np.asarray(bits.b).tolist(), strict=True))

    prompts = [[1, 2], [1], [1, 2], [2, 1]]
    assert len(states(prompts, 0)) == 4
    assert states(prompts, 0) == states(prompts[::-1], 0)
    assert not states(prompts, 0) & states(prompts, 1)
    assert states([[1]], 0) < states(prompts, 0)
