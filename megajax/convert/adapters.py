"""Export a LoRA run's adapters as a folder that `peft` loads: `adapter_config.json` and `adapter_model.safetensors`.

`peft` has one adapter per module of the transformers model. If a module contains several of our products, as GPT-2's
`c_attn` contains query, key and value, its adapter has the sum of their ranks: the As are stacked, and each B is in the
rows of its product, with zeros elsewhere. Letters: I inputs of a module, O outputs, R rank.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from megajax.convert.adapter_options import SETTINGS, TENSORS
from megajax.convert.exporting import exchange_of_run
from megajax.convert.importing import check_new
from megajax.convert.origin import Origin
from megajax.convert.tensor_files import WEIGHTS, write_tensors
from megajax.convert.tokenizer_files import write_objects
from megajax.convert.weights import Tensor, TensorPlace, dim_sizes, whole_layout, whole_model
from megajax.core.errors import UserError
from megajax.core.models.lora import LORA, Adapters
from megajax.host.files import folder_atomically
from megajax.runs.trained import weights_in_parts
from megajax.settings.config import Config

# Module of the transformers model (with `{layer}` in its name) in a kind of layers -> our products in it
# (`Adapters.products`) -> place.
_Modules = dict[tuple[str, str], dict[tuple[str, ...], TensorPlace]]


def check_has_adapters(run_dir: Path, config: Config) -> None:
    """Check that a run has adapters that can be exported."""
    if not config.lora.rank:
        raise UserError(
            f"--adapter: RUN {run_dir} was trained without adapters; valid: a run with --lora.rank 1 "
            "or more, or without --adapter"
        )
    if any(name.startswith("expert_") for name in config.lora.products(config.model)):
        raise UserError(
            f"--adapter: RUN {run_dir} has adapters on experts, which peft does not support; valid: without --adapter"
        )


def export_adapter(run_dir: Path, config: Config, folder: Path, step: str = "latest", *, dtype: str | None) -> int:
    """Write a run's adapters to `folder`, which appears complete or not at all, as in `export_hf`; returns the step.
    With `dtype` None, fp32 is written."""
    check_new(folder, "PATH")
    layout = whole_layout(config)
    read, step_number = weights_in_parts(layout, run_dir, step)
    leaves = jax.tree_util.tree_leaves_with_path(layout.canonical_shapes.params)
    paths = [path for path, _ in leaves if path[0].key == LORA]
    stored = {tuple(key.key for key in path[1:]): array for path, array in zip(paths, read(paths), strict=True)}
    tensors = joined_tensors(run_dir, config, stored)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    with folder_atomically(folder.absolute()) as new:
        dtypes = dict.fromkeys(shapes, dtype or "fp32")
        write_tensors(new, shapes, tensors.items(), dtypes, sum(8 * t.size for t in tensors.values()))
        (new / WEIGHTS).rename(new / TENSORS)
        write_objects(new, {SETTINGS: _settings(config, _modules(run_dir, config))})
    return step_number


def joined_tensors(
    run_dir: Path, config: Config, adapters: Mapping[tuple[str, ...], npt.NDArray[Any]]
) -> dict[str, Tensor]:
    """Turn adapters in canonical form (or anything with their shapes) by path into `peft`'s tensors by name."""
    tensors: dict[str, Tensor] = {}
    for products in _modules(run_dir, config).values():
        pairs = [(adapters["blocks", *product, "a"], adapters["blocks", *product, "b"]) for product in products]
        place = next(iter(products.values()))
        for (number,), weight in place.tensors(config.model):
            name = f"base_model.model.{weight.removesuffix('.weight')}"
            a_RI, b_OR = _joined(list(products.values()), [(a[number], b[number]) for a, b in pairs], config)
            tensors |= {f"{name}.lora_A.weight": a_RI, f"{name}.lora_B.weight": place.in_pairs(b_OR, config.model)}
    return tensors


def _modules(run_dir: Path, config: Config) -> _Modules:
    places = exchange_of_run(run_dir, config, Origin.read(run_dir)).places(config.model)
    modules: _Modules = {}
    for product in Adapters(config.lora, config.model, whole_model(config.model)).products:
        place = places.blocks["/".join((*product, "weight"))]
        modules.setdefault((place.name.removesuffix(".weight"), place.of), {})[product] = place
    return modules


def _joined(places: list[TensorPlace], pairs: list[tuple[Any, Any]], config: Config) -> tuple[Tensor, Tensor]:
    """The two matrices of a module's adapter, from those of its products in one layer."""
    rank, (dims, turned) = config.lora.rank, (places[0].dims, places[0].turned)
    a_RI = np.concatenate([a.reshape(-1, rank).T for a, _ in pairs]).astype(np.float32)
    b_RO = np.zeros((len(a_RI), dim_sizes(config.model)[dims[0 if turned else -1]]), np.float32)
    for number, (place, (_, b)) in enumerate(zip(places, pairs, strict=True)):
        own = place.own(b_RO[number * rank : (number + 1) * rank], config.model)
        own[...] = b.reshape(own.shape)
    return a_RI, b_RO.T


def _settings(config: Config, modules: _Modules) -> dict[str, Any]:
    lora, dense = config.lora, config.model.dense_layers
    # `peft` finds a module in every layer by these names; GPT-2 has two called `c_proj`.
    targets = {".".join(name.split(".")[-2:]): products for (name, _), products in modules.items()}
    several = {target: len(products) for target, products in targets.items() if len(products) > 1}
    (turned,) = {place.turned for products in modules.values() for place in products.values()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [*targets],
        # Not the first layers of a mixture, which are dense.
        "layers_to_transform": [*range(dense, config.model.num_layers)] if dense else None,
        "rank_pattern": {target: count * lora.rank for target, count in several.items()},
        "alpha_pattern": {target: count * lora.alpha for target, count in several.items()},
        "fan_in_fan_out": not turned,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
    }
