"""Bytes by part, from a configuration alone: exact where they can be, near XLA's where they are a model. What a layer
is traced to keep is what the program keeps, to the byte; a new option of a layer is seen."""

import dataclasses
import math

import jax
import optax
import pytest
from jax.sharding import NamedSharding
from tiny import LINEAR, LLAMA, MIXTURE, QWEN3, abstract_batch, full, tiny_config, tiny_program

from megajax.core.backend import CPU, GPU, HOPPER
from megajax.core.models.lora_config import LoraConfig
from megajax.core.models.mlp import MLP
from megajax.core.optim.own import OwnOptimizer
from megajax.core.program.memory import factor_bytes, residual_bytes, state_bytes
from megajax.plan import traced
from megajax.plan.compiled import Compilation
from megajax.plan.memory import memory
from megajax.plan.sizes import held

BERT = {"family": "bert", "layer_order": "post"}
HYBRID = LLAMA | LINEAR | {"linear_layers": "2,1"}
CASES = [
    ((2, 2, 2), {"precision": "bf16"}),
    ((4, 1, 2), {"zero": 0, "precision": "fp16"} | LLAMA),
    ((1, 2, 4), {"num_layers": 5, "vocabulary": "split"} | QWEN3),
    ((2, 2, 2), {"zero": 3, "num_layers": 6, "schedule": "interleaved", "chunks": 2} | BERT),
    ((2, 2, 2), {"lora": LoraConfig(rank=4)}),
    ((4, 1, 2), {"zero": 3, "precision": "fp16", "lora": LoraConfig(rank=2, targets=("query", "down"))}),
    ((8, 1, 1), {"zero": 3, "optimizer": {"name": "muon", "zero_ranks": 4}}),
    ((5, 1, 1), {"global_batch": 10, "precision": "bf16"} | QWEN3),
    ((7, 1, 1), {"global_batch": 14, "zero": 3} | LLAMA),
    ((2, 2, 2), {"precision": "bf16", "num_layers": 5, "optimizer": {"name": "muon"}} | QWEN3),
    ((2, 1, 2, 2), {"zero": 3}),
    ((2, 1, 2), {"expert": 2, "zero": 3, "balance": "bias"} | MIXTURE),
    ((1, 2, 2), {"expert": 2} | MIXTURE),
    ((2, 2, 2), {"zero": 3, "num_layers": 5} | HYBRID),
]


@pytest.mark.parametrize(("mesh", "options"), CASES)
def test_weights_are_those_of_the_program(mesh, options) -> None:
    """Their names and, on a device, their shapes."""
    config = tiny_config(mesh, **options)
    layout, found = tiny_program(config).layout, held(config)
    frozen = [
        {name: tree[name] for name in ("blocks", "shared")} for tree in (layout.shapes.params, layout.specs.params)
    ]
    for weights, shapes, specs, owned in (
        (found.weights, *frozen, False),
        (found.trained, layout.shapes.main or layout.trained(layout.shapes.params), layout.trained_specs, True),
    ):
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        for each, (path, leaf), spec in zip(weights, leaves, jax.tree.leaves(specs), strict=True):
            local = NamedSharding(layout.mesh, spec).shard_shape(leaf.shape)
            assert each.path == tuple(key.key for key in path)
            assert each.stage_shape(each.owned if owned else each.computed) == local


OWN = [  # an optimizer of the user's: on shards, and on whole weights
    ((2, 2, 2), {"own_optimizer": OwnOptimizer(optax.lion), "precision": "bf16"}),
    ((4, 1, 2), {"own_optimizer": OwnOptimizer(optax.lamb), "num_layers": 1}),
]


@pytest.mark.parametrize(("mesh", "options"), [*CASES, *OWN])
def test_the_state_is_exact(mesh, options) -> None:
    own = options.get("own_optimizer")
    config = tiny_config(mesh, **{name: each for name, each in options.items() if name != "own_optimizer"})
    config = dataclasses.replace(config, own_optimizer=own)
    if config.precision == "fp16":
        half_sums = dataclasses.replace(config.optimizer, gradient_dtype="fp16")
        config = dataclasses.replace(config, optimizer=half_sums)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, ema=0.5))
    found, program = memory(config, CPU, traced.step_cost(tiny_config(), CPU)), tiny_program(config)  # any step's cost
    assert state_bytes(program) == {
        "weights": found.weights,
        "main weights": found.main_weights,
        "moments": found.moments,
        "average": found.average,
        "gradients": found.gradients,
    }


@pytest.mark.slow
def test_it_is_what_live_arrays_have() -> None:
    """On one device of a mesh, batch included."""
    config = tiny_config((2, 2, 2), precision="bf16", num_layers=5)
    state, found = tiny_program(config).layout.init(), memory(config, CPU)

    def on_one(tree) -> int:
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    parts = state.params, state.main, state.optimizer
    assert [*map(on_one, parts)] == [found.weights, found.main_weights, found.moments]
    rows = {name: leaf.shape[0] // 2 for name, leaf in abstract_batch(config).items()}
    assert found.batch == sum(4 * count * 16 for count in rows.values())


def test_parts_add_up_and_no_part_is_forgotten() -> None:
    config = tiny_config((2, 4, 1), weight_gradients="deferred", schedule="gpipe", vocabulary="split")
    found = memory(config)
    assert found.total == sum(dataclasses.asdict(found).values()) == found.state + found.of_step
    assert min(found.kept, found.factors, found.p2p_transfers, found.temporaries) > 0
    together = memory(tiny_config((2, 4, 1), schedule="gpipe", vocabulary="split"))
    assert together.factors == 0 and together.kept == found.kept


def test_what_saves_memory_does() -> None:
    """Every way of saving, on its own part."""
    plain = {"num_layers": 8, "microbatch": 2, "dropout": 0.0, "precision": "bf16"}
    base = memory(tiny_config((2, 1, 4), **plain), GPU)
    for change, part in (
        ({"zero": 3}, "weights"),
        ({"remat": "selective"}, "kept"),
        ({"remat": "layer"}, "kept"),
        ({"sequence_parallel": True}, "kept"),
        ({"microbatch": 1}, "kept"),
    ):
        saved = memory(tiny_config((2, 1, 4), **plain | change), GPU)
        assert getattr(saved, part) < getattr(base, part), change
    assert memory(tiny_config((2, 1, 4), **plain | {"zero": 0}), GPU).moments > base.moments


@pytest.mark.parametrize("asked", ["auto", "kernel"])
def test_the_plan_of_our_own_kernels(asked):
    """Their sizes must be numbers, so blocks stand for them, which save the same."""
    model = {"precision": "bf16", "hidden_size": 128, "num_heads": 2, "dropout": 0.1}
    assert memory(tiny_config(**model, attention=asked), HOPPER) == memory(tiny_config(**model), GPU)


# Large enough that scalars, padding and alignment do not count; `benchmarks/plan.py memory` has the published sizes.
SIZES = {"num_layers": 8, "hidden_size": 256, "num_heads": 8, "sequence_length": 256, "vocab_size": 4000}
WIDE = SIZES | {"head_size": 32, "num_kv_heads": 4, "mlp_size": 768}
BATCH = {"microbatch": 4, "global_batch": 32}
MIXED = MIXTURE | WIDE | BATCH | {"expert_size": 384, "shared_expert_size": 0, "expert_capacity": 1.25, "expert": 2}
STATES = LLAMA | WIDE | BATCH | {"linear_heads": 8, "linear_key_heads": 4, "dropout": 0.0}
NEAR = [
    ((2, 1, 2), SIZES | BATCH | {"dropout": 0.0}),
    *(
        full(*case)
        for case in (
            ((2, 2, 2), SIZES | BATCH),
            ((2, 1, 2), SIZES | BATCH | {"optimizer": {"name": "muon"}}),
            ((2, 1, 2), SIZES | BATCH | {"precision": "bf16"}),
            ((1, 4, 2), SIZES | BATCH | {"precision": "bf16", "weight_gradients": "deferred", "remat": "selective"}),
            ((1, 4, 2), LLAMA | WIDE | BATCH | {"remat": "selective"}),
            ((4, 1, 2), BERT | SIZES | BATCH),
            ((1, 4, 2), SIZES | BATCH | {"weight_gradients": "deferred", "remat": "layer"}),
            ((1, 1, 4, 1), SIZES | BATCH | {"sequence_length": 1024, "context_attention": "heads"}),
            ((1, 2, 2, 2), SIZES | BATCH | {"sequence_length": 1024, "context_attention": "gather"}),
            ((1, 1, 4, 1), LLAMA | WIDE | BATCH | {"sequence_length": 1024, "sliding_window": 100}),
            ((2, 1, 2), MIXED),
            ((1, 2, 2), MIXED | {"remat": "selective"}),
            ((2, 1, 2), MIXED | {"expert_capacity": 0.0}),
            ((2, 1, 2), STATES),
            ((1, 2, 2), STATES | {"linear_layers": "3,1", "remat": "selective", "sequence_parallel": True}),
            ((1, 1, 2, 1), STATES | {"linear_layers": "3,1", "sequence_length": 1024, "context_attention": "gather"}),
            ((2, 1, 2), STATES | {"linear_layers": "3,1", "remat": "layer", "zero": 3}),
        )
    ),
]


@pytest.mark.parametrize(("mesh", "options"), NEAR)
@pytest.mark.slow
def test_it_is_within_15_percent_of_what_xla_allocates(mesh, options) -> None:
    config = tiny_config(mesh, **options)
    found, said = Compilation(config).result(), memory(config, CPU)
    assert 0 <= found.state - said.state < 1024
    assert said.of_step == pytest.approx(found.temporaries, rel=0.15)


FAMILIES = {"gpt2": {}, "llama": LLAMA, "qwen": QWEN3, "bert": BERT, "mixture": MIXTURE | {"expert_capacity": 1.25}}
FAMILIES |= {"hybrid": HYBRID}
MODES = {
    "none": {"remat": "none"},
    "none, split, fp64": {"remat": "none", "sequence_parallel": True, "precision": "fp64"},
    "selective, no dropout": {"remat": "selective", "dropout": 0.0},
    "selective, split": {"remat": "selective", "sequence_parallel": True, "precision": "bf16"},
    "layer, split": {"remat": "layer", "sequence_parallel": True},
    "stage": {"remat": "stage", "microbatch": 2},
    "heads": {"context_attention": "heads", "remat": "selective"},
    "gather, split": {"context_attention": "gather", "remat": "none", "sequence_parallel": True},
}
SOME = {("llama", "gather, split"), ("hybrid", "selective, split"), ("mixture", "selective, split")}
TRACED = [
    pytest.param(family, mode, marks=() if (family, mode) in SOME else pytest.mark.full)
    for family in FAMILIES
    for mode in MODES
    if (family, mode) not in (("mixture", "stage"), ("hybrid", "heads"), ("hybrid", "gather, split"))
]


@pytest.mark.parametrize(("family", "mode"), TRACED)
@pytest.mark.slow
def test_it_is_what_the_program_keeps(family, mode) -> None:
    options = FAMILIES[family] | {"num_layers": 5, "weight_gradients": "deferred"} | MODES[mode]
    config = tiny_config((1, 2, 2, 2) if "context_attention" in options else (1, 2, 4), **options)
    found = memory(config, CPU)
    with jax.enable_x64(config.precision == "fp64"):
        program = tiny_program(config)
        assert found.kept == program.schedule.num_slots * residual_bytes(program)
        assert found.factors == program.schedule.num_factor_slots * factor_bytes(program)


@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", "selective"])
def test_of_documents_in_one_row(remat) -> None:
    config = tiny_config((2, 1, 2), remat=remat, reset_attention=True, microbatch=2, **LLAMA)
    assert memory(config, CPU).kept == residual_bytes(tiny_program(config))


def test_attention_on_gpus_is_kept_once() -> None:
    """Its result has two names where it is cuDNN's, which is traced on any machine."""
    config = tiny_config((1, 1, 2), head_size=8, dropout=0.0, precision="bf16")
    none, selective = (traced.layer_cost(config, GPU, remat) for remat in ("none", "selective"))
    assert none.fused and selective.fused and not traced.layer_cost(config, CPU, "none").fused
    activation, heads, inner = 16 * 24 * 2, 16 * 4 * 8 * 2, 16 * 48 * 2
    statistics = 16 * 4 * 4
    assert none.residuals.num_bytes(1) == 4 * activation + 4 * heads + statistics + 2 * inner
    assert selective.residuals.num_bytes(1) == 2 * activation + 4 * heads + statistics + inner


def test_a_new_option_of_a_layer_needs_no_line_here(monkeypatch) -> None:
    """A third sum in the MLP is communicated, a product that is computed twice takes longer."""
    config = tiny_config((1, 1, 2), dropout=0.0)
    before = traced.layer_cost(config, CPU, "none")
    call = MLP.__call__
    monkeypatch.setattr(MLP, "__call__", lambda self, *args: (call(self, *args)[0] + call(self, *args)[0], {}))
    traced._traced.cache_clear()
    after = traced.layer_cost(config, CPU, "none")
    traced._traced.cache_clear()
    assert len(after.forward) == len(before.forward) + 1 and len(after.products) == len(before.products) + 2
    assert after.residuals.num_bytes(1) > before.residuals.num_bytes(1)


@pytest.mark.parametrize("capacity", [0.0, full(1.25)])
def test_products_of_experts_have_the_rows_that_are_chosen(capacity) -> None:
    """On each device of an expert group; with a capacity as many as fit."""
    config = tiny_config(expert=2, microbatch=2, **MIXTURE | {"expert_capacity": capacity})
    model, rows = config.model, 0
    for product in traced.layer_cost(config, CPU, "layer").products:
        assert product.experts in (0, model.num_experts // 2)
        rows += product.dims.shape(2)[0] if product.experts else 0
    chosen = model.num_experts * math.ceil(1.25 * 16 * 2 / 8) if capacity else 16 * model.experts_per_token
    assert rows == 2 * 2 * chosen  # of the first two products, side by side, and the third


def test_sizes_are_linear_in_rows() -> None:
    """Those of three rows, and what does not depend on them."""
    config = tiny_config((1, 2, 2), remat="layer", **LLAMA)
    cost = traced.layer_cost(config, CPU, "layer")
    one, two, three = (cost.residuals.num_bytes(rows) for rows in (1, 2, 3))
    assert three - two == two - one and 0 < 2 * one - two < one
    program = tiny_program(dataclasses.replace(config, train=dataclasses.replace(config.train, microbatch=4)))
    assert 2 * cost.residuals.num_bytes(4) == residual_bytes(program)  # two layers
