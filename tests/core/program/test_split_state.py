"""ZeRO and sequence parallelism: what a split sequence communicates, counted on the jaxpr, and what a device keeps;
bytes per parameter beside Megatron-LM's published rows. All that ZeRO sends is in
`tests/test_golden_communication.py`."""

import dataclasses
import re
from collections import Counter

import jax
import pytest
from counting import LAYERS, ROWS
from tiny import abstract_batch, full, tiny_config, tiny_program

from megajax.core.backend import GPU
from megajax.core.models.staged import count_parameters
from megajax.core.pipeline.executor import Pipeline
from megajax.core.program.bind import trace_pipeline
from megajax.core.program.memory import left_by_zero, state_bytes
from megajax.core.program.overlap import scans_layers
from megajax.core.program.program import Program
from megajax.core.program.train_step import loss_and_gradients
from megajax.plan.sizes import held
from megajax.settings.presets import load_preset, resolve

TENSOR = 4
SEQUENCE = 20


def kept(config) -> list[tuple[int, ...]]:
    """Shapes of what a layer keeps until its backward, without the dim of stacked layers."""
    return [leaf.shape[1:] for leaf in trace_pipeline(tiny_program(config), Pipeline.residual_types)]


@pytest.mark.parametrize(
    ("remat", "scan"),
    [("none", "true"), ("selective", "false")] + [full(*case) for case in (("none", "false"), ("selective", "true"))],
)
def test_what_a_layer_keeps_of_a_split_sequence(remat, scan):
    """Every activation of the width of the residual path (inputs of LayerNorm, of dropout, of the residual additions,
    and the matrix products' inputs before they are gathered) is divided by the tensor size; inside the regions nothing
    changes, and no gathered activation is kept."""
    options = {"hidden_size": 32, "sequence_length": SEQUENCE, "microbatch": ROWS, "global_batch": ROWS}
    options |= {"remat": remat, "scan_layers": scan, "num_layers": LAYERS}
    whole = Counter(kept(tiny_config((1, 2, TENSOR), **options)))
    split = Counter(kept(tiny_config((1, 2, TENSOR), sequence_parallel=True, **options)))
    width, residual, own = 32, (ROWS, SEQUENCE, 32), (ROWS, SEQUENCE // TENSOR, 32)
    in_mlp = Counter({(ROWS, SEQUENCE, 4 * width // TENSOR): 2 if remat == "none" else 1})
    assert residual in whole and (whole - in_mlp)[residual] == split[own] == {"none": 4, "selective": 2}[remat]
    tokens = [shape for shape in split if len(shape) == 3 and shape[:2] == (ROWS, SEQUENCE)]
    assert all(split[shape] == in_mlp[shape] for shape in tokens)


@pytest.mark.parametrize("remat", ["none", "layer", "stage"])
def test_gathered_weights_are_not_kept_for_the_backward(remat):
    shapes = [
        kept(tiny_config((2, 2, 2), zero=zero, remat=remat, sequence_parallel=True, microbatch=2)) for zero in (0, 3)
    ]
    assert shapes[0] and Counter(shapes[0]) == Counter(shapes[1])


@pytest.mark.full
def test_scanned_layers_are_gathered_in_the_compiled_loop():
    """The compiled forward and backward of ZeRO-3 have as many all-gathers for 6 layers as for 3: none was moved out of
    a loop over layers, where what it gathers would be kept. On GPUs `scan_layers auto` scans them."""
    counts = []
    for layers in (3, 6):
        config = tiny_config((2, 1, 1), zero=3, num_layers=layers)
        program = tiny_program(config)
        arguments = program.layout.shapes.params, abstract_batch(config), jax.ShapeDtypeStruct((), "int32")
        passes = loss_and_gradients(program).lower(*arguments)
        text = passes.compile({"xla_backend_optimization_level": 0}).as_text()
        counts.append(len(re.findall(r" all-gather(?:-start)?\(", text)))
    assert counts[0] == counts[1] > 12
    on_gpu = dataclasses.replace(config, model=dataclasses.replace(config.model, scan_layers="auto"))
    unsplit = dataclasses.replace(on_gpu, optimizer=dataclasses.replace(config.optimizer, zero=1))
    assert scans_layers(on_gpu, GPU) and not scans_layers(unsplit, GPU)


PUBLISHED = {  # (precision, dtype of the gradients): replicated, and distributed as (replicated part, part over data)
    ("fp16", "fp16"): (20, (4, 16)),
    ("fp16", "fp32"): (18, (6, 12)),
    ("bf16", "bf16"): (20, (4, 16)),
    ("bf16", "fp32"): (18, (6, 12)),
    ("fp32", "fp32"): (16, (8, 8)),
}


def program(data: int, zero: int, precision: str, gradient_dtype: str) -> Program:
    """A model whose dims all divide."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 8, "sequence_length": 32, "vocab_size": 512}
    config = tiny_config((data, 1, 1), precision=precision, zero=zero, **sizes)
    optimizer = dataclasses.replace(config.optimizer, gradient_dtype=gradient_dtype)
    return tiny_program(dataclasses.replace(config, optimizer=optimizer))


@pytest.mark.parametrize("data", [1, *(full(data) for data in (2, 4)), 8])
@pytest.mark.parametrize("row", PUBLISHED, ids="-".join)
def test_bytes_per_parameter(row, data):
    """Within 1% of the published rows; ZeRO-3 divides everything."""
    replicated, (whole, split) = PUBLISHED[row]
    for zero, expected in ((0, replicated), (1, whole + split / data), (3, (whole + split) / data)):
        made = program(data, zero, *row)
        found = sum(state_bytes(made).values()) / count_parameters(made.config.model)
        assert found == pytest.approx(expected, rel=0.01), zero


@pytest.mark.parametrize("preset", ["llama3-8b", *map(full, ("gpt2-355m", "gpt2-8.3b", "mixtral-8x7b"))])
def test_bytes_per_parameter_on_any_number_of_devices(preset: str) -> None:
    """Within 0.2% of the published rows with ZeRO-1; with ZeRO-3 padding weighs more, the narrower a model is."""
    for zero, (whole, split), most in ((1, (6, 12), 0.002), (3, (0, 18), 0.05)):
        every = range(1, 129) if preset != "llama3-8b" else (3, 5, 12, 89, 127, 128)
        for data in every:
            config = resolve(
                load_preset(preset), {"optimizer.zero": zero, "mesh.data": data, "train.global_batch": data}
            )
            found = held(config)
            size = found.computed_bytes(2, 4) + 4 * found.num_summed + 12 * found.num_trained
            expected = whole + split / data
            assert expected <= size / count_parameters(config.model) <= (1 + most) * expected, (zero, data)


def test_what_cannot_be_sharded_is_told() -> None:
    """Only vectors that `tensor` shards, and padding; nothing where all dims divide."""
    config = tiny_config((5, 1, 2), mlp_size=36, global_batch=10, precision="bf16")
    layout = Program.abstract(config, GPU).layout
    names, whole, padding = left_by_zero(layout)
    assert names == ["blocks/mlp/up/bias"] and whole == 4 * 18 * 12 and padding > 0, (names, whole)
    assert left_by_zero(program(4, 1, "bf16", "fp32").layout) == ([], 0, 0)
