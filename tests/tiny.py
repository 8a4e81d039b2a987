"""A model small enough to compile in seconds, with every dim different from the others."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from megajax.core.config import MeshConfig
from megajax.core.errors import UserError
from megajax.core.mesh import shardings
from megajax.core.models.config import ModelConfig
from megajax.core.models.lora_config import LoraConfig
from megajax.core.optim.config import OptimizerConfig
from megajax.core.parallel.random import RandomBits
from megajax.core.pipeline.config import PipelineConfig
from megajax.core.program.program import Program, batch_form
from megajax.data.config import DataConfig
from megajax.settings.config import Config, TrainConfig
from megajax.verify.run import drawn_weights

# Words of decoders; of the second, heads of keys are fewer than devices where a tensor group has more than two.
LLAMA = {
    **{"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "bias": "none", "tied_embedding": False},
    **{"head_size": 4, "num_kv_heads": 4, "mlp_size": 64},
    **{"rope_scaling": "yarn", "rope_factor": 8.0, "rope_original_length": 32},
}
QWEN3 = {
    **{"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "bias": "none", "query_key_norm": True},
    **{"head_size": 6, "num_kv_heads": 2, "mlp_size": 40, "sliding_window": 5, "norm_epsilon": 1e-6},
}
OLMO2 = QWEN3 | {"query_key_norm_over": "width", "layer_order": "reordered"}
GEMMA = QWEN3 | {"norm": "rmsnorm-1p", "layer_order": "sandwich", "activation": "geglu-tanh", "query_scalar": 4}
GEMMA |= {"scaled_embedding": True, "window_layers": "1,1", "window_rope_theta": 20.0}
LATENT = LLAMA | {  # DeepSeek's, with every size of attention different from the others
    **{"num_kv_heads": 0, "head_size": 8, "rotary_size": 2, "value_size": 6, "latent_size": 5, "query_latent_size": 7},
    **{"rope_score_scale": 1.0},
}
LINEAR = {"linear_heads": 4, "linear_key_heads": 2, "linear_key_size": 3, "linear_value_size": 2, "linear_chunk": 4}
LINEAR |= {"linear_convolution": 3, "linear_write": 2.0}
GPT_OSS = {"attention_sinks": True, "bias": "all", "activation": "swiglu-clamped", "swiglu_limit": 0.5}  # its own words
MIXTURE = LLAMA | {"num_experts": 8, "experts_per_token": 2, "expert_size": 16, "shared_expert_size": 8}


def user_error(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """The one line of the `UserError` that a call raises."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def full(*values: object) -> Any:
    """A case of the long selection alone (`make test-full`)."""
    return pytest.param(*values, marks=pytest.mark.full)


def tiny_config(
    mesh: tuple[int, ...] = (1, 1, 1),
    *,
    schedule: str = "1f1b",
    chunks: int = 1,
    layers: str = "even",
    vocabulary: str = "replicated",
    weight_gradients: str = "together",
    paired_microbatches: bool = False,
    remat: str = "none",
    ema: float = 0.0,
    microbatch: int = 1,
    global_batch: int = 8,
    precision: str = "fp32",
    zero: int = 1,
    freeze: tuple[str, ...] = (),
    sequence_parallel: bool = False,
    reset_attention: bool = False,
    lora: LoraConfig | None = None,
    expert: int = 1,
    optimizer: dict[str, Any] | None = None,
    **model,
) -> Config:
    """A configuration on `mesh` (data, pipe, tensor) or (data, pipe, context, tensor); `model` overrides fields of
    `ModelConfig`, `optimizer` those of `OptimizerConfig`."""
    data, pipe, *context, tensor = mesh
    rates = {"learning_rate": 1e-3, "warmup_steps": 2, "decay_steps": 10, "zero": zero}
    defaults = {"num_layers": 4, "hidden_size": 24, "num_heads": 8, "sequence_length": 16, "vocab_size": 101}
    return Config(
        precision=precision,
        sequence_parallel=sequence_parallel,
        lora=lora or LoraConfig(),
        model=ModelConfig(**defaults | {"vocab_multiple": 64, "scan_layers": "true"} | model),
        mesh=MeshConfig(data=data, expert=expert, pipe=pipe, context=math.prod(context), tensor=tensor),
        pipeline=PipelineConfig(
            schedule=schedule,
            chunks=chunks,
            layers=layers,
            vocabulary=vocabulary,
            weight_gradients=weight_gradients,
            paired_microbatches=paired_microbatches,
        ),
        train=TrainConfig(
            steps=10, global_batch=global_batch, microbatch=microbatch, remat=remat, ema=ema, freeze=freeze
        ),
        data=DataConfig(reset_attention=reset_attention),
        optimizer=OptimizerConfig(**rates | (optimizer or {})),
    )


@jax.jit
def hash_of(*coordinates) -> jax.Array:
    """The bits that dropout has for these coordinates."""
    state = RandomBits.from_seed(coordinates[0])
    for index in coordinates[1:-1]:
        state = state.fold(index)
    return state.last(coordinates[-1])


def tiny_program(config: Config) -> Program:
    """The program of `config` on the first simulated devices."""
    return Program.on(config, jax.devices()[: config.mesh.num_devices])


def abstract_batch(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Types of a global batch."""
    shapes = batch_form(config).shapes(config.train.global_batch, tokens=config.model.sequence_length)
    return {name: jax.ShapeDtypeStruct(shape, np.int32) for name, shape in shapes.items()}


def drawn_params(program: Program, weights: Any = None) -> dict:
    """Weights that numpy draws (nothing is compiled), in their shards, in the dtype that layers compute with; or those
    given, in canonical form."""
    layout, weights = program.layout, weights or drawn_weights(program)
    pipelined = {"shared": weights["shared"], "blocks": jax.tree.map(layout.placement.to_stages, weights["blocks"])}
    return jax.device_put(layout.computed(pipelined), shardings(layout.mesh, layout.specs.params))
