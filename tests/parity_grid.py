"""The rows of `test_parity.py`: which meshes, schedules, … and models meet, by default and in the whole grid, and what
configuration each is."""

import itertools
from typing import Any

import numpy as np
from tiny import GEMMA, GPT_OSS, LATENT, LLAMA, OLMO2, QWEN3, tiny_config

from megajax.core.models.lora_config import LoraConfig
from megajax.core.pipeline.schedule import SCHEDULES
from megajax.settings.config import Config

MESHES = [(1, 1, 1), (2, 1, 1), (4, 1, 2), (8, 1, 1), (1, 1, 8)]  # heads = tensor size in the last one
PIPES = [(1, 2, 4), (1, 4, 1), (2, 2, 2), (1, 4, 2), (1, 8, 1)]
GRID = {
    "mesh": MESHES + PIPES,
    "schedule": [
        f"{name}-{chunks}" for name in sorted(SCHEDULES) for chunks in ([2, 4] if SCHEDULES[name].chunked else [1])
    ],
    "vocabulary": ["replicated", "split"],
    "remat": ["none", "selective", "layer", "stage"],
    "weight_gradients": ["together", "deferred"],
    "microbatches": ["fewer", "not a multiple", "a multiple"],  # of the stages
    "layers": ["not divisible", "divisible"],  # by the virtual stages
    "zero": [0, 1, 3],
    "sequence_parallel": [False, True],
    "model": ["gpt2", "bert-pre", "bert-post"],
}


def exists(row: tuple) -> bool:
    """Interleaving needs a pipe, and so do splitting the vocabulary over it and deferring weight gradients; ZeRO has
    something to split where there is data parallelism, and the sequence is split over a tensor group."""
    (data, pipe, tensor), *of_pipe, _, weight_gradients, microbatches, layers, zero, sequence_parallel, _ = row
    alone = [*of_pipe, weight_gradients, layers] == ["1f1b-1", "replicated", "together", "divisible"]
    split = (data > 1 or zero == 1) and (tensor > 1 or not sequence_parallel)
    return split and (pipe > 1 or (alone and microbatches != "not a multiple"))


def cover(rows: list[tuple], meetings: list[tuple[int, ...]], seed: int | None = None) -> list[int]:
    """Numbers of rows that contain, for every meeting of columns, all their values that occur together; chosen
    greedily, of equally good rows the first, or the first of an order drawn for a seed."""
    columns = [_numbered(column) for column in zip(*rows, strict=True)]
    values = [np.ravel_multi_index([columns[c] for c in meeting], [len(rows)] * len(meeting)) for meeting in meetings]
    order = np.arange(len(rows)) if seed is None else np.random.default_rng(seed).permutation(len(rows))
    added, met, chosen = np.full(len(rows), len(meetings)), set(), []  # what a row would add
    while added.max() > 0:
        best = int(order[added[order].argmax()])
        chosen.append(best)
        for meeting, own in zip(meetings, values, strict=True):
            if (meeting, own[best]) not in met:
                met.add((meeting, own[best]))
                added -= own == own[best]
    return chosen


def _numbered(values: tuple) -> np.ndarray:
    """Equal values have equal numbers."""
    numbers: dict = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values])


def name(row: tuple) -> str:
    return "-".join("x".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in row)


ALL = [row for row in itertools.product(*GRID.values()) if exists(row)]


NAMES = ("mesh", "schedule", "remat", "weight_gradients", "microbatches", "layers", "zero", "model")
MESH, SCHEDULE, REMAT, WEIGHT_GRADIENTS, MICROBATCHES, LAYERS, ZERO, MODEL = map(list(GRID).index, NAMES)
BETWEEN = ((2, 2, 2), "1f1b-1", "replicated", "none", "together", "not a multiple", "not divisible", 1, False, "gpt2")


def row(**columns: object) -> tuple:
    """A row of these columns; the others are those of `BETWEEN`."""
    return tuple((dict(zip(GRID, BETWEEN, strict=True)) | columns).values())


def kind(row: tuple) -> str:
    """Of schedule, whatever its chunks are."""
    return row[SCHEDULE].partition("-")[0]


def recomputed(row: tuple) -> bool:
    """Whether whole layers are run again."""
    return row[REMAT] in ("layer", "stage")


# Columns of which not the values meet but kinds of them.
APART = {
    (MESH, REMAT): lambda row: (row[REMAT], *(size > 1 for size in row[MESH][1:])),
    (SCHEDULE, REMAT): lambda row: (row[REMAT], kind(row)),
    (SCHEDULE, ZERO): lambda row: (row[ZERO], kind(row)),
}
FURTHER_APART = APART | {
    (SCHEDULE, MICROBATCHES): lambda row: (row[MICROBATCHES], kind(row)),
    (SCHEDULE, MODEL): lambda row: (row[MODEL], kind(row)),
    (REMAT, MODEL): lambda row: (row[REMAT], row[MODEL].partition("-")[0]),  # families
    (SCHEDULE, WEIGHT_GRADIENTS): lambda row: (row[WEIGHT_GRADIENTS], kind(row)),
    (SCHEDULE, LAYERS): lambda row: (row[LAYERS], kind(row)),
    (MESH, SCHEDULE): lambda row: (row[MESH], kind(row)),
    (REMAT, MICROBATCHES): lambda row: (row[MICROBATCHES], recomputed(row)),
    (REMAT, ZERO): lambda row: (row[ZERO], recomputed(row)),
}


def pairwise(rows: list[tuple], apart: dict = APART, seed: int | None = None) -> list[tuple]:
    """Every two columns meet, or their kinds do."""
    pairs = [pair for pair in itertools.combinations(range(len(GRID)), 2) if pair not in apart]
    meetings = [*pairs, *((len(GRID) + number,) for number in range(len(apart)))]
    with_kinds = [(*row, *(kinds(row) for kinds in apart.values())) for row in rows]
    return [rows[number] for number in cover(with_kinds, meetings, seed)]


USUAL = [(4, 1, 2), (1, 1, 8), (2, 2, 2), (1, 4, 2)]  # every two axes, and every axis without another
DEEP = row(mesh=(1, 8, 1), schedule="interleaved-2", vocabulary="split", weight_gradients="deferred")
UNPIPED = row(mesh=(4, 1, 2), remat="stage", zero=3, microbatches="fewer", layers="divisible", sequence_parallel=True)
# Of other models: heads of keys that several devices hold, a gate, an output table of its own; the last by Muon.
FEW_MODELS = [
    row(schedule="interleaved-2", vocabulary="split", remat="selective", zero=3, model="llama-muon"),
    row(mesh=(1, 2, 4), weight_gradients="deferred", sequence_parallel=True, model="qwen3"),
]
PAIRS = pairwise(ALL)  # every two columns meet
# A row of all that can be divided; by default rows are in `test_field.py`.
DEFAULT = [row(schedule="interleaved-2", vocabulary="split", remat="selective", zero=3)]
# The whole grid, in exact numbers (`test_field.py`): every three columns meet, and every two on every mesh.
TRIPLES = [ALL[number] for number in cover(ALL, list(itertools.combinations(range(len(GRID)), 3)))]


def pipeline_code(row: tuple) -> bool:
    """What meets in the pipeline's code, all of it: schedule, chunks, vocabulary and remat, with three numbers of
    microbatches and of layers, and with weight gradients deferred with one, on the mesh where all of it can be seen."""
    inside = row[WEIGHT_GRADIENTS : LAYERS + 1] in [
        ("together", "fewer", "not divisible"),
        ("together", "not a multiple", "not divisible"),
        ("together", "a multiple", "divisible"),
        ("deferred", "not a multiple", "not divisible"),
    ]
    return row[MESH] == (2, 2, 2) and row[ZERO:] == (1, False, "gpt2") and inside


PIPELINES = list(filter(pipeline_code, ALL))
# Heads of tasks: every two columns meet. A choice has the head of classes.
HEADS = [f"bert-{order}-{head}" for head in ("classes", "span") for order in ("pre", "post")]
BERTS = [row[:-1] for row in ALL if row[MESH] in USUAL and row[-1] == "bert-pre"]
CLASSES = row(microbatches="fewer", sequence_parallel=True, model="bert-post-classes")
TASKS = [CLASSES, *pairwise([(*row, model) for row in BERTS for model in HEADS])]
# Decoders of other words: the same. On (1, 1, 8) and (1, 2, 4) heads of keys are held several times.
DECODERS = {"llama": LLAMA, "qwen3": QWEN3, "olmo2": OLMO2, "gemma3": GEMMA, "latent": LATENT}
MUONS = {f"{name}-muon": words | {"optimizer": {"name": "muon"}} for name, words in DECODERS.items()}
GPTS = [row[:-1] for row in ALL if row[MESH] in USUAL and row[-1] == "gpt2"]
OF_DECODERS = pairwise([(*row, model) for row in GPTS for model in DECODERS])
OF_MUON = pairwise([(*row, model) for row in GPTS for model in MUONS])
# Mixtures as DeepSeek's and GPT-OSS's: in rows of `test_parity.py` alone.
OF_EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_size": 16}
MIXTURES = {
    "deepseek": LATENT | OF_EXPERTS | {"shared_expert_size": 8, "dense_layers": 1, "balance": "bias"},
    "gpt-oss": LLAMA | OF_EXPERTS | GPT_OSS | {"sliding_window": 5, "window_layers": "1,1"},
}
MIXTURES["deepseek"] |= {"router_scores": "sigmoid", "expert_groups": 4, "chosen_groups": 2, "share_scale": 2.5}
# Adapters in place of the weights: the same, whatever the products.
LORAS = {
    "gpt2-lora": {"lora": LoraConfig(rank=3, alpha=5.0)},
    "llama-lora": LLAMA | {"lora": LoraConfig(rank=2)},
    "qwen3-lora": QWEN3 | {"lora": LoraConfig(rank=4, targets=("query", "key", "output", "mlp"))},
}
OF_LORAS = pairwise([(*row, model) for row in GPTS for model in LORAS])
LORA = {"schedule": "interleaved-2", "vocabulary": "split", "remat": "selective", "weight_gradients": "deferred"}
FEW_LORAS = [
    row(zero=3, sequence_parallel=True, model="llama-lora", **LORA),
    row(mesh=(2, 1, 4), microbatches="a multiple", layers="divisible", sequence_parallel=True, model="qwen3-lora"),
]
MUON = (*FEW_MODELS[1][:-1], "qwen3-muon")
SOME_OF_OTHERS = [*TASKS[::4], *OF_DECODERS[::4], *OF_LORAS[::4]]
# What is compiled.
REST = [row for row in [*PAIRS, UNPIPED, *FEW_MODELS, DEEP, MUON, *FEW_LORAS, *SOME_OF_OTHERS] if row not in DEFAULT]
ROWS = 24  # of the global batch


def config_of(row: tuple, **others: Any) -> Config:
    """Of a row, and what it says nothing of."""
    mesh, schedule, vocabulary, remat, weight_gradients, microbatches, layers, zero, sequence_parallel, model = row
    data, pipe, _ = mesh
    schedule, _, chunks = schedule.rpartition("-")
    virtual = pipe * int(chunks)
    # Few models, so that few references are needed. Of 5 layers, eight virtual stages have some without any.
    size = {"num_layers": 5, "vocab_size": 101}  # whose vocabulary is padded
    if layers == "divisible":
        size = {"num_layers": virtual * -(-8 // virtual), "vocab_size": 128}
    multiple = {1: 3, 2: 4, 4: 8, 8: 8}[pipe]
    number = {"fewer": max(1, pipe // 2), "not a multiple": pipe + pipe // 2, "a multiple": multiple}[microbatches]
    assert ROWS % (data * number) == 0
    options = {"schedule": schedule, "chunks": int(chunks), "vocabulary": vocabulary, "remat": remat, "zero": zero}
    options |= {"sequence_parallel": sequence_parallel, "microbatch": ROWS // data // number, "global_batch": ROWS}
    options |= {"weight_gradients": weight_gradients}
    return tiny_config(mesh, **options | size | of(model) | others)


def of(model: str) -> dict[str, Any]:
    others = DECODERS | MIXTURES | LORAS | MUONS
    if model in others:
        return others[model]
    family, order, head = (*model.split("-"), *("", "")[model.count("-") :])
    return {"family": family, "layer_order": order or "pre", "head": head or "pretraining"}
