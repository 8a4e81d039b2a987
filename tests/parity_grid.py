"""The table of configurations whose step must be that of one device. `test_field.py` compares every row exactly;
`test_parity.py` compiles the few that show what only a compiler can.

A row is words, its name: a mesh, a schedule, an option and its value, or what `WORDS` has. Those of grids are chosen so
that words meet.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from tiny import GEMMA, GPT_OSS, LATENT, LLAMA, MIXTURE, OLMO2, QWEN3, tiny_config

from megajax.core.models.lora_config import LoraConfig
from megajax.core.pipeline.schedule import SCHEDULES
from megajax.settings.config import Config

# Of the second and the third, heads of keys are held several times where a tensor group has more devices.
DECODERS = {"llama": LLAMA, "qwen3": QWEN3, "olmo2": OLMO2, "gemma3": GEMMA, "latent": LATENT}
MUON = {"optimizer": {"name": "muon"}}
LORAS = {
    "gpt2-lora": {"lora": LoraConfig(rank=3, alpha=5.0)},
    "llama-lora": LLAMA | {"lora": LoraConfig(rank=2)},
    "qwen3-lora": QWEN3 | {"lora": LoraConfig(rank=4, targets=("query", "key", "output", "mlp"))},
}
HEADS = [f"bert-{order}-{head}" for head in ("classes", "span") for order in ("pre", "post")]
WORDS: dict[str, dict[str, Any]] = {
    **DECODERS | LORAS | {f"{name}-muon": words | MUON for name, words in DECODERS.items()},
    "few-keys": LLAMA | {"num_kv_heads": 2, "attention_sinks": True},
    **{f"bert-{order}": {"family": "bert", "layer_order": order} for order in ("pre", "post")},
    **{"mixture": MIXTURE | {"num_experts": 4}, "sinks": GPT_OSS, "muon": MUON, "undropped": {"dropout": 0.0}},
    **{word: {"tied_embedding": word == "tied"} for word in ("tied", "untied")},
    **{f"ranks-{number}": {"optimizer": {"zero_ranks": number}} for number in (1, 2, 3)},
    **{precision: {"precision": precision} for precision in ("fp64", "bf16", "fp16", "fp8")},
    **{way: {"context_attention": way} for way in ("gather", "heads")},
    **{remat: {"remat": remat} for remat in ("selective", "layer", "stage")},
    **{word: {} for word in ("gpt2", "-", "fewer", "multiple", "divisible")},  # see `on_stages`
    "documents": {"reset_attention": True},
    "split": {"vocabulary": "split"},
    "deferred": {"weight_gradients": "deferred"},
    "sequence": {"sequence_parallel": True},
    "adapters": {"lora": LoraConfig(rank=2)},
    "adapted-experts": {"lora": LoraConfig(rank=2, targets=("attention", "experts"))},
    "reduced-early": {"optimizer": {"overlap_reductions": "true"}},
    "gathered-late": {"optimizer": {"overlap_gathers": "true"}},
    "unrolled": {"scan_layers": "false"},
    "in-pairs": {"paired_microbatches": True},
    "groups-of-experts": {"expert_groups": 2, "balance": "both", "share_scale": 2.5},
    "chosen-share": {"renormalize_shares": False},
    "plain-queries": {"query_latent_size": 0},
    "gated": {"shared_expert_gate": True},
}
SMALL = {"hidden_size": 16, "vocab_multiple": 8, "num_heads": 4, "sequence_length": 8, "vocab_size": 21}


def options(words: str) -> dict[str, Any]:
    """Those of `tiny_config` that words say, the later ones in place of the earlier."""
    said: dict[str, Any] = SMALL
    for word in words.split():
        name, _, value = word.replace("window=", "sliding_window=").partition("=")
        kind, _, end = word.rpartition("-")
        if value:
            more: dict[str, Any] = {name: value}
            with contextlib.suppress(ValueError):
                more = {name: float(value) if "." in value else int(value)}
        elif kind in SCHEDULES:
            more = {"schedule": kind, "chunks": int(end)}
        elif word[0].isdigit():
            more = {"mesh": tuple(map(int, word.split("x")))}
        else:
            more = WORDS[word] if word in WORDS else WORDS[kind] | {"head": end}
        said = said | more | {"optimizer": said.get("optimizer", {}) | more.get("optimizer", {})}
    return said


def on_stages(words: str) -> dict[str, Any]:
    """A batch of 24 rows in microbatches that are fewer than the stages, a multiple of them, or neither; three layers,
    or a number that virtual stages divide, as does a tensor group the vocabulary then."""
    said, row = options(words), {*words.split()}
    data, pipe, tensor = said["mesh"]
    number = pipe + pipe // 2
    if row & {"fewer", "multiple"}:
        number = max(1, pipe // 2) if "fewer" in row else {1: 3, 2: 4, 4: 4, 8: 8}[pipe]
    assert 24 % (data * number) == 0
    size = {"num_layers": 3, "vocab_size": 21}
    if "divisible" in row:
        size = {"num_layers": max(4, pipe * said.get("chunks", 1)), "vocab_size": 24}
    return said | size | {"global_batch": 24, "microbatch": 24 // data // number, "num_heads": max(4, tensor)}


def on_context(words: str) -> dict[str, Any]:
    """Two microbatches, no more layers than virtual stages, and few blocks of attention."""
    said = options(words)
    data, pipe, context, _ = said["mesh"]
    size = {"num_layers": pipe * said.get("chunks", 1), "sequence_length": max(24, 8 * context)}
    heads = {"num_heads": 8 if said["context_attention"] == "heads" else 4}
    return said | size | heads | {"global_batch": 2 * data, "microbatch": 1}


def with_experts(words: str) -> dict[str, Any]:
    """Two layers that have experts, and two microbatches."""
    said = options("mixture router_z_loss=0.01 " + words)
    shards, dense = said["mesh"][0] * said["expert"], said.get("dense_layers", 0)
    size = {"num_layers": 2 + dense, "microbatch": max(1, 4 // shards), "num_experts": max(4, said["expert"])}
    return said | size


def cover(rows: list[tuple], meetings: list[tuple[int, ...]]) -> list[int]:
    """Numbers of rows that contain, for every meeting of columns, all their values that occur together; chosen
    greedily, of equally good rows the first."""
    columns = [_numbered(column) for column in zip(*rows, strict=True)]
    values = [np.ravel_multi_index([columns[c] for c in meeting], [len(rows)] * len(meeting)) for meeting in meetings]
    added, met, chosen = np.full(len(rows), len(meetings)), set(), []  # what a row would add
    while added.max() > 0:
        chosen.append(best := int(added.argmax()))
        for meeting, own in zip(meetings, values, strict=True):
            if (meeting, own[best]) not in met:
                met.add((meeting, own[best]))
                added -= own == own[best]
    return chosen


def _numbered(values: tuple) -> np.ndarray:
    """Equal values have equal numbers."""
    numbers: dict = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values])


SCHEDULE = ["gpipe-1", *(f"{name}-{chunks}" for name in SCHEDULES if SCHEDULES[name].chunked for chunks in (2, 4))]
PIPED = {"split", "deferred", *SCHEDULE}
OF_PIPES = ["- " + " ".join(SCHEDULE), "- split", "- selective layer stage"]
OPTIONS = [*OF_PIPES, "- deferred", "fewer - multiple", "- divisible", "zero=0 - zero=3", "- sequence"]
GRID = ["1x1x1 2x1x1 4x1x2 8x1x1 1x1x8 1x2x4 1x4x1 2x2x2 1x4x2 1x8x1", *OPTIONS, "gpt2 bert-pre bert-post"]
USUAL = "4x1x2 1x1x8 2x2x2 1x4x2"  # every two axes, and every axis without another
# Meshes of the others are data, pipe, context, tensor, and expert.
CONTEXTS = [
    "1x1x2x1 1x1x3x1 1x1x4x1 1x1x8x1 2x1x2x1 1x2x2x1 1x1x2x2 2x2x2x1 2x1x2x2 1x2x2x2 1x1x2x4 1x2x4x1",
    "gpt2 bert-pre bert-post-classes bert-pre-span llama few-keys llama-lora",
    *("heads gather", "- documents", "- window=5 window=20", "- selective layer stage", "- split"),
    *("- gpipe-1 interleaved-2", "- deferred", "zero=0 - zero=3", "- sequence"),
]
EXPERTS = [
    "1x1x1x1,2 1x1x1x1,8 2x1x1x1,4 1x2x1x1,4 1x1x2x1,4 1x1x1x2,4 1x2x1x2,2 2x1x2x1,2 1x1x2x2,2 2x2x1x2,1 1x2x2x1,2 "
    "2x2x1x1,2 2x1x2x2,1",
    *("expert_capacity=0.0 expert_capacity=1.0 expert_capacity=1.25", "balance=none balance=loss balance=bias"),
    *("zero=0 - zero=3", "- selective layer", "- gpipe-1 interleaved-2", "- deferred", "- sequence"),
    *("shared_expert_size=0 gated", "dense_layers=0 dense_layers=1 dense_layers=2"),
]


def exists(row: tuple[str, ...]) -> bool:
    """Interleaving needs a pipe, and so do splitting the vocabulary over it and deferring weight gradients; ZeRO has
    something to split where batches are, and the sequence is split over a tensor group."""
    mesh, _, expert = row[0].partition(",")
    data, pipe, *context, tensor = map(int, mesh.split("x"))
    piped = pipe > 1 or PIPED.isdisjoint(row)
    if len(row) == len(GRID):
        piped &= pipe > 1 or ("divisible" in row and ("fewer" in row or "multiple" in row))
    shards = data * math.prod(context) * int(expert or 1)
    split = (shards > 1 or not {"zero=0", "zero=3"} & {*row}) and (tensor > 1 or "sequence" not in row)
    fits = "heads" not in row or 8 // tensor % context[0] == 0
    decodes = not row[1].startswith("bert") or not {"documents", "window=5", "window=20"} & {*row}
    return piped and split and fits and decodes


def meeting(columns: list[str], number: int = 2) -> list[str]:
    """Rows in which every two words of different columns meet, or as many."""
    rows = [row for row in itertools.product(*map(str.split, columns)) if exists(row)]
    chosen = cover(rows, [*itertools.combinations(range(len(columns)), number)])
    return [_named(rows[each]) for each in chosen]


def _named(row: tuple[str, ...]) -> str:
    return " ".join(word for word in row if word != "-").replace(",", " expert=")


# What meets in the pipeline's code, all of it, where all of it can be seen.
INSIDE = ["fewer", "-", "multiple divisible", "deferred"]
PIPELINES = [_named(row) for row in itertools.product(["2x2x2"], *map(str.split, OF_PIPES), INSIDE, ["gpt2"])]
OTHER_MODELS = [HEADS, DECODERS, [f"{name}-muon" for name in DECODERS], LORAS]
OF_GRIDS = [
    *meeting(GRID, 3),
    *PIPELINES,
    *(row for models in OTHER_MODELS for row in meeting([USUAL, *OPTIONS, " ".join(models)])),
]


# What rows have in common, and one row a line. A line also says how it is compared: by "default" or with the long grids
# alone; with its other "branches"; not with the plan ("unplanned"); also "compiled", in fp64, and in fp8 with operands
# rounded to e4m3.
GROUPS = {
    "grid": (
        "",
        """
        2x2x2 interleaved-2 split selective deferred zero=3 sequence llama-lora default branches unplanned compiled
        2x2x2 fewer sequence bert-post-classes layers=0,3 default branches compiled
        2x2x2 interleaved-2 split selective zero=3 llama-muon compiled
        1x2x4 deferred sequence qwen3 compiled
        4x1x2 stage fewer divisible zero=3 sequence compiled
        1x8x1 interleaved-2 split deferred
        2x2x2 interleaved-2 split selective zero=3 compiled
        1x1x8 layer multiple divisible sequence compiled
        1x4x2 interleaved-2 split selective deferred
        1x4x2 interleaved-2 split stage bert-pre-span
        2x2x2 interleaved-4 multiple divisible zero=3 sequence
        2x2x2 interleaved-2 split zero=3 sequence olmo2
        2x1x2 fewer divisible zero=0 qwen3-muon
        1x4x2 gpipe-1 layer deferred llama
        2x1x4 multiple divisible sequence qwen3-lora
        1x1x8 fewer divisible gpt2-lora
        4x1x2 fewer divisible zero=3 bert-post-choice
        """,
    ),
    "fp8": (
        "fp8 branches compiled",
        """
        1x2x4 deferred sequence qwen3
        2x2x2 interleaved-2 selective zero=3 sequence
        2x2x2 interleaved-2 split selective deferred zero=3 sequence llama-lora
        2x2x2 selective sequence bert-post
        """,
    ),
    "layers on the stages": (
        "num_layers=3 vocab_size=24 branches",
        """
        1x3x1 layers=2,0,1 gpipe-1 split
        1x2x2 layers=3,0 deferred fp16 muon
        2x2x2 layers=0,2,1,0 interleaved-2 zero=3 deferred sequence compiled
        1x4x1 layers=0,1,2,0 stage deferred
        1x3x1 layers=1,0,0,0,1,1 interleaved-2 layer adapters
        2x4x1 layers=1,0,1,0,0,1,0,0 interleaved-2 split zero=0
        """,
    ),
    "context": (
        "",
        """
        1x2x2x2 heads few-keys documents window=20 selective interleaved-2 split deferred sequence default compiled
        1x1x4x1 gather gpt2 documents window=5
        2x1x2x2 gather few-keys documents layer zero=3 sequence compiled
        1x2x2x2 gather bert-pre gpipe-1 split deferred sequence compiled
        1x1x3x1 gather llama window=20 layer zero=0
        1x2x4x1 gather llama documents window=5 selective deferred compiled
        1x1x2x1 heads bert-pre-span zero=0
        1x2x2x2 gather gemma3 selective compiled
        """,
    ),
    "documents": (
        "2x2x2 sequence documents num_layers=3 global_batch=24",
        """
        interleaved-2 split zero=3 microbatch=4
        gpipe-1 stage microbatch=3
        split layer microbatch=2
        deferred microbatch=3
        """,
    ),
    "experts": (
        "",
        """
        1x2x1x2 expert=2 expert_capacity=1.0 balance=bias layer interleaved-2 deferred sequence dense_layers=1 gated \
            compiled
        2x1x2x1 expert=2 expert_capacity=1.25 balance=loss zero=3 selective shared_expert_size=0 dense_layers=2 compiled
        1x2x1x1 expert=4 balance=loss deferred shared_expert_size=0 dense_layers=1 compiled
        """,
    ),
    # Experts that drop nothing multiply several blocks at once, as on GPUs.
    "precisions": (
        "global_batch=4 unplanned",
        """
        2x1x2 mixture sinks muon fp16 expert=2 balance=bias ema=0.5 num_layers=1 undropped gated \
            default branches
        1x2x1 mixture sinks adapted-experts expert=2 deferred num_layers=2 undropped default
        1x1x2 mixture sinks fp8 expert=2 dense_layers=1 bf16_layers=1,1 num_layers=3 selective branches compiled
        2x1x2x2 llama muon bf16 zero=3 num_layers=2
        2x2x2 fp64 zero=0 documents gpipe-1 stage
        1x1x2 fp8 num_layers=2 global_batch=8 compiled
        1x1x2x2 fp8 mixture expert=2 expert_capacity=1.0 zero=3 sequence_length=16 global_batch=8 compiled
        2x1x2 fp8 mixture expert=2 deferred layer global_batch=8 compiled
        1x2x2 fp8 qwen3 num_kv_heads=1 deferred global_batch=8 compiled
        2x2x2 fp8 zero=3 sequence bf16_layers=1,1 stage global_batch=8 compiled
        """,
    ),
    "latents": (
        "latent global_batch=4",
        """
        1x1x2 mixture latent num_layers=2 dense_layers=1 groups-of-experts router_scores=sigmoid expert=2 \
            expert_capacity=1.0 deferred sequence undropped default unplanned
        1x2x1 mixture latent num_layers=3 dense_layers=1 groups-of-experts router_scores=sigmoid expert=2 deferred
        1x1x1 mixture latent num_layers=1 groups-of-experts plain-queries balance=loss chosen-share expert=2
        1x2x2 sequence selective deferred num_layers=2
        1x1x2x2 gather selective dropout=0.5 compiled
        2x1x2 plain-queries sequence zero=3
        1x2x2 plain-queries sequence deferred num_layers=2
        1x2x2 sequence layer num_layers=2
        1x2x2 plain-queries stage num_layers=2
        1x1x2x2 gather sequence
        1x2x2x1 plain-queries gather layer num_layers=2
        1x1x2x2 heads selective
        1x1x2x2 window=3 sequence_length=16
        1x2x2x1 window=3 sequence_length=16 num_layers=2
        1x1x2 fp8 sequence compiled
        1x2x2 plain-queries fp8 deferred num_layers=2
        1x1x2x2 fp8 gather
        1x1x2 adapters
        2x1x2 plain-queries adapters sequence
        2x1x2 fp16 muon
        """,
    ),
    "modules for further tokens": (
        "llama num_layers=1 prediction_modules=2 global_batch=4",
        """
        1x2x2 documents sequence zero=3 num_layers=2 tied window=3 window_layers=1,1 undropped default unplanned
        1x2x1 mixture sinks expert=2 deferred num_layers=3 dense_layers=1 balance=both expert_capacity=1.0
        1x2x1 mixture sinks expert=2 split num_layers=2
        1x1x2x1 mixture sinks expert=2 balance=both gather
        1x2x2 latent sequence layer num_layers=2
        1x1x2x2 heads documents dropout=0.5
        1x2x2 gemma3 num_layers=2 window=3
        1x1x2 positions=learned sequence dropout=0.5
        1x2x1 interleaved-2 deferred stage num_layers=4
        1x1x2x2 latent gather fp8
        1x1x2 adapters sequence
        2x1x2 muon fp16 ema=0.5
        2x2x1 tied reduced-early gathered-late num_layers=2
        1x2x1 prediction_coefficient=0.0 num_layers=2
        """,
    ),
    # Numbers of devices that divide no dim of most weights.
    "padded state": (
        "vocab_size=101",
        """
        3x1x2x2 llama fp8 zero=3 sequence global_batch=6 undropped default unplanned
        3x2x1 mixture expert=2 ema=0.5 global_batch=12 undropped default unplanned
        6x2x1 muon ranks-3 split num_layers=2 global_batch=12 default
        6x2x1 muon bf16 split num_layers=2 global_batch=12
        5x1x1 llama muon fp16 zero=3 num_layers=2 global_batch=10 branches
        7x1x1 adapters zero=3 num_layers=2 global_batch=7
        12x1x2 fp16 zero=3 num_layers=2 global_batch=12 branches
        3x1x2 zero=3 sequence num_layers=2 global_batch=6 compiled
        """,
    ),
    "replicas": (
        "num_layers=3",
        """
        4x1x1 ranks-2 zero=3 fp16 undropped default branches
        6x1x1 ranks-3 reduced-early gathered-late global_batch=12
        6x1x2 ranks-3 ema=0.5 global_batch=12
        6x1x2 ranks-3 zero=3 fp16 sequence global_batch=12 branches
        4x2x1 ranks-2 deferred reduced-early gathered-late global_batch=16
        4x2x1 ranks-2 deferred zero=3 reduced-early gathered-late global_batch=16
        4x2x1 ranks-2 deferred zero=3 muon interleaved-2 num_layers=4 reduced-early gathered-late global_batch=16
        4x2x1 ranks-2 zero=3 split global_batch=16
        4x1x1 ranks-2 mixture expert=2 global_batch=16
        4x1x1 ranks-2 mixture expert=2 zero=3 global_batch=16
        4x1x1 ranks-1 mixture expert=2 zero=3 global_batch=16
        4x1x2 ranks-2 llama muon
        4x1x1 ranks-2 adapters zero=3
        4x1x2x2 ranks-2 llama fp8 zero=3
        4x1x1 ranks-1
        4x1x2 ranks-2 zero=3 reduced-early gathered-late unrolled compiled
        """,
    ),
    # Every layer's gradients are reduced by themselves, its weights gathered during the first forward pass.
    "beside the passes": (
        "num_layers=3",
        """
        2x2x1 gemma3 interleaved-2 deferred split window=3 reduced-early gathered-late global_batch=6 rotary_size=4 \
            default
        4x1x1 gathered-late microbatch=2 default
        3x1x1 untied reduced-early gathered-late global_batch=6
        4x1x1 reduced-early gathered-late microbatch=2
        2x3x1 gathered-late bf16 layer
        2x2x1 reduced-early gathered-late microbatch=4 num_layers=4
        2x2x1 reduced-early gathered-late interleaved-2 fp16 ema=0.5 num_layers=4
        2x3x1 reduced-early gathered-late deferred sequence zero=0
        2x2x1 reduced-early gathered-late deferred gpipe-1 stage
        2x1x2 reduced-early gathered-late adapters sequence
        2x2x2 reduced-early gathered-late adapters sequence
        2x2x2 reduced-early gathered-late bert-post sequence
        1x2x2x1 reduced-early gathered-late llama muon
        1x2x1 mixture sinks reduced-early gathered-late deferred expert=2 dense_layers=1 global_batch=4
        2x2x2 reduced-early gathered-late fp8
        2x1x1 untied reduced-early gathered-late unrolled in-pairs num_layers=2 undropped default unplanned
        2x2x1 untied reduced-early gathered-late unrolled in-pairs num_layers=2 undropped deferred default compiled
        2x2x1 unrolled reduced-early num_layers=4
        2x2x1 unrolled reduced-early deferred split
        """,
    ),
}
HOW = {"default", "branches", "unplanned", "compiled"}


HOW = {"default", "branches", "unplanned", "compiled"}
SIZED = {"grid": on_stages, "fp8": on_stages, "context": on_context, "experts": with_experts}


class Row(NamedTuple):
    group: str
    words: str
    how: set[str]

    @property
    def config(self) -> Config:
        return tiny_config(**SIZED.get(self.group, options)(self.words))


def _table() -> Iterator[tuple[str, Row]]:
    for group, (common, lines) in GROUPS.items():
        for line in lines.strip().splitlines() + (OF_GRIDS if group == "grid" else []):
            words = [word for word in line.split() if word not in HOW]
            both = f"{common} {line}".split()
            said = " ".join(word for word in both if word not in HOW)
            yield f"{group}: {' '.join(words)}", Row(group, said, HOW & {*both})


TABLE = dict(_table())
