"""Continuations from a cache are those of the whole window, on every mesh, however prompts are batched and ordered."""

import functools

import jax
import numpy as np
import pytest
from tiny import LATENT, QWEN3, drawn_params, full, tiny_config, tiny_program

from megajax.core.program.scoring import logits as logits_of
from megajax.generation.choice import Sampling
from megajax.generation.decoder import TOKENS_AT_ONCE, Decoder
from megajax.generation.window import continue_in_windows

SEQUENCE = 16
PROMPTS = [np.random.default_rng(length).integers(0, 101, length).tolist() for length in (3, 1, 11, 16, 6)]
DRAWN = Sampling(1.0, top_k=30, top_p=0.95, seed=3, min_p=0.01, repetition_penalty=1.3)
GREEDY = Sampling(0.0)
Texts = dict[int, tuple[list[int], str]]
WORDS = {"gpt2": {}, "qwen3": QWEN3, "latent": LATENT}


@functools.cache
def model(mesh: tuple[int, int, int] = (1, 1, 1), num_layers: int = 2, words: str = "gpt2"):
    sizes = {"num_layers": num_layers, "sequence_length": SEQUENCE, "init_std": 0.3}
    program = tiny_program(tiny_config(mesh, global_batch=num_layers, **sizes | WORDS[words]))
    return program, drawn_params(program)


@functools.cache
def decoder(
    mesh: tuple[int, int, int] = (1, 1, 1), sampling: Sampling = DRAWN, end: int | None = None, words: str = "gpt2"
) -> Decoder:
    return Decoder(*model(mesh, words=words), sampling, () if end is None else (end,))


def texts(of: Decoder, prompts: list[list[int]] = PROMPTS, max_tokens: int = 9, batch: int = 4) -> Texts:
    """Ids of every prompt and why they end; nothing comes after the end."""
    found: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    stops: dict[int, str] = {}
    for piece in of.stream(prompts, max_tokens=max_tokens, batch=batch):
        assert piece.number not in stops and len(piece.ids) <= TOKENS_AT_ONCE
        found[piece.number] += piece.ids
        if piece.stopped_by:
            stops[piece.number] = piece.stopped_by
    return {number: (ids, stops[number]) for number, ids in found.items()}


@pytest.mark.parametrize(
    ("sampling", "of"),
    [
        (GREEDY, {}),
        (DRAWN, {}),
        (GREEDY, {"mesh": (1, 1, 4), "words": "qwen3"}),
        full(GREEDY, {"mesh": (1, 1, 2), "words": "latent"}),
    ],
)
def test_the_ids_are_those_of_the_whole_window(sampling, of):
    """For prompts of one token up to the whole context, after which one token more fits."""
    found = texts(decoder(sampling=sampling, **of))
    ends = [(9, "length"), (9, "length"), (6, "context"), (1, "context"), (9, "length")]
    assert [(len(ids), stop) for ids, stop in found.values()] == ends
    assert len({tuple(ids) for ids, _ in found.values()}) == 5
    for number, prompt in enumerate(PROMPTS):
        ids = found[number][0]
        assert ids == [*continue_in_windows(*model(**of), prompt, num_tokens=len(ids), sampling=sampling)]


@pytest.mark.full  # by default: test_generation_command.py
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 2), (4, 1, 1), (1, 1, 8)])
def test_every_mesh_gives_the_same_ids(mesh, sampling):
    assert texts(decoder(mesh, sampling), batch=3) == texts(decoder(sampling=sampling))


def test_neither_batch_nor_order_nor_length_matters():
    """One by one, in the other order, with fewer tokens wanted; of equal prompts each has its own draw."""
    expected = texts(decoder())
    assert texts(decoder(), batch=1) == expected
    turned = texts(decoder(), PROMPTS[::-1])
    assert [turned[4 - number] for number in expected] == list(expected.values())
    shorter = texts(decoder(), max_tokens=3)
    assert [ids for ids, _ in shorter.values()] == [ids[:3] for ids, _ in expected.values()]
    twice = texts(decoder(), [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[2]])
    assert twice[0] == expected[0] and twice[1] == expected[1] and twice[0] != twice[2]


def test_it_stops_before_the_end_token():
    """In its row only, at once or later."""
    expected = texts(decoder(sampling=GREEDY))
    first, others = expected[0][0], [number for number in expected if number]
    before = first[: first.index(first[3])]
    found = texts(decoder(sampling=GREEDY, end=first[3]), [*PROMPTS[1:], PROMPTS[0], PROMPTS[0] + before])
    assert found[4] == (before, "end") and found[5] == ([], "end")
    for place, number in enumerate(others):
        assert found[place] == expected[number] or first[3] in expected[number][0]


def test_it_stops_where_it_is_told():
    """In that row only, and in the middle of what is computed at once."""
    expected = texts(decoder(sampling=GREEDY))
    told: list[int] = []

    def stops(number: int, ids: list[int]) -> int | None:
        told.append(number)
        return min(3, len(ids)) if number in (0, 2) and told.count(number) == 2 else None

    pieces = [*decoder(sampling=GREEDY).stream(PROMPTS, max_tokens=9, batch=4, stops=stops)]
    found: dict[int, list[int]] = {number: [] for number in expected}
    for piece in pieces:
        found[piece.number] += piece.ids
    assert {piece.number for piece in pieces if piece.stopped_by == "stop"} == {0, 2}
    assert told.count(0) == told.count(2) == 2, "as long as they continue"
    for number, (ids, _) in expected.items():
        assert found[number] == (ids[:4] if number in (0, 2) else ids), "the first comes alone"


@pytest.mark.parametrize("sampling", [DRAWN, full(GREEDY)])
def test_whole_texts_correct_what_a_cache_drafts(sampling):
    """As with --bitwise, here with drafts of other weights; log-probabilities are those of the whole texts' logits."""
    program, params = model()
    of = Decoder(program, params, sampling, (), logprobs=True)
    of._bitwise, of._weights = True, jax.tree.map(lambda weight: weight * 1.1, of._weights)
    found = {piece.number: piece for piece in of.stream(PROMPTS, max_tokens=9, batch=4)}
    of._bitwise = False
    assert texts(of, max_tokens=8) != texts(decoder(sampling=sampling), max_tokens=8), "drafts of other weights differ"
    assert {number: (piece.ids, piece.stopped_by) for number, piece in found.items()} == texts(
        decoder(sampling=sampling)
    )
    whole = np.zeros((2, SEQUENCE), np.int32)  # of the second, the last id is outside the context
    for row in range(2):
        text = [*PROMPTS[row + 1], *found[row + 1].ids]
        whole[row, : len(text)] = text[:SEQUENCE]
        logits = np.asarray(logits_of(program)(params, program.put_batch({"tokens": whole}, [0, 1])), np.float64)[row]
        right = [logits[place - 1, text[place]] for place in range(len(PROMPTS[row + 1]), len(text))]
        sums = np.log(np.exp(logits[:, :101]).sum(-1))[len(PROMPTS[row + 1]) - 1 :][: len(right)]
        np.testing.assert_allclose(found[row + 1].logprobs, right - sums, atol=1e-5)


PROMPT = [5, 17, 99]


def draw(mesh, *, temperature: float = 1.0, seed: int = 3, ends: tuple[int, ...] = ()) -> list[int]:
    """By the whole window alone, with a pipe."""
    sampling = Sampling(temperature, seed=seed, repetition_penalty=1.1)
    return [*continue_in_windows(*model(mesh, num_layers=4), PROMPT, num_tokens=20, sampling=sampling, ends=ends)]


@pytest.mark.parametrize("mesh", [(2, 2, 2), full((1, 4, 1))])
def test_every_mesh_draws_the_same_text(mesh):
    """Also beyond the window of 16 tokens, where the oldest tokens leave it."""
    assert draw(mesh) == draw((1, 1, 1)) and len(draw(mesh)) == 20


def test_the_seed_and_the_temperature_matter():
    assert draw((1, 1, 1), seed=4) != draw((1, 1, 1), seed=3)
    greedy = draw((1, 1, 1), temperature=0.0)
    assert greedy == draw((1, 1, 1), temperature=0.0, seed=9) != draw((1, 1, 1))


def test_a_window_stops_before_the_end_token():
    greedy = draw((1, 1, 1), temperature=0.0)
    assert draw((1, 1, 1), temperature=0.0, ends=(greedy[5], 1 << 20)) == greedy[: greedy.index(greedy[5])]
