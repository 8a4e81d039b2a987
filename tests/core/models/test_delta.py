"""Layers of linear attention: a step on a mesh is that of one device, exactly, with documents that begin anywhere."""

import pytest
from field import SMALL, assert_exact
from tiny import LLAMA, tiny_config

from megajax.core.models.lora_config import LoraConfig

WORDS = LLAMA | SMALL | {"num_heads": 2, "num_kv_heads": 2, "sequence_length": 16, "vocab_size": 21, "dropout": 0.0}
WORDS |= {"rope_scaling": "none", "rope_factor": 1.0, "rope_original_length": 8192, "mlp_size": 8, "num_layers": 1}
BY_HEAD = {"linear_heads": 4, "linear_key_heads": 2, "linear_key_size": 3, "linear_value_size": 2, "linear_chunk": 4}
BY_HEAD |= {"linear_convolution": 3, "linear_write": 2.0}
BY_CHANNEL = BY_HEAD | {"linear_key_heads": 4, "linear_decay": "channel", "linear_gate": "sigmoid"}
FEW_KEYS = BY_HEAD | {"linear_key_heads": 1, "linear_chunk": 2}

ROWS = {
    "tensor": ((1, 1, 2), BY_HEAD | {"reset_attention": True}),
    "context": ((1, 1, 2, 1), BY_HEAD | {"reset_attention": True, "context_attention": "gather"}),
    "channels": ((1, 1, 2, 2), BY_CHANNEL | {"reset_attention": True, "sequence_parallel": True, "zero": 3}),
    "deferred": ((1, 2, 2), FEW_KEYS | {"num_layers": 2, "weight_gradients": "deferred", "sequence_parallel": True}),
    "heads": ((1, 1, 2, 1), FEW_KEYS | {"context_attention": "heads", "remat": "selective"}),
    "adapters": ((2, 1, 2), BY_CHANNEL | {"lora": LoraConfig(rank=2), "precision": "bf16"}),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_step_is_that_of_one_device(name: str) -> None:
    mesh, words = ROWS[name]
    assert_exact(tiny_config(mesh, **WORDS | {"global_batch": 4} | words), branches=False, planned=False)
