"""LoRA adapters of `peft`, merged into a model's tensors when these are read.

What `peft` would compute with a folder's `adapter_config.json` and `adapter_model.safetensors` decides. Letters: O
outputs of a module, I inputs, R rank, E experts.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megajax.convert.adapter_options import SETTINGS, TENSORS, AdapterOptions
from megajax.convert.exchange import Exchange
from megajax.convert.tensor_files import TensorFiles, listed
from megajax.convert.weights import Tensor, TensorPlaces
from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.host import reading

_PICKLE = "adapter_model.bin"
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\.(?P<kind>lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB]"
    r"|lora_magnitude_vector|token_adapter\.trainable_tokens_delta"
    r"|(?:base_layer\.|original_module\.|modules_to_save\.)?(?:weight|bias))"
)
_TOKENS = "token_adapter.trainable_tokens_delta"
_BEFORE = "original_module"  # copies of the base model's tensors
_Shape = tuple[int, ...]


class _Expert(NamedTuple):
    """The part of an adapter of fused experts that belongs to one tensor."""

    experts: int  # how many there are
    number: int | None = None  # whose tensor it is; None: that of all, [experts, in, out]
    rows: slice = slice(None)  # its outputs among those of the fused tensor


class _Fused(NamedTuple):
    """A tensor of all of a layer's experts, as transformers 5 has it in memory."""

    experts: int
    inputs: int
    outputs: int
    parts: dict[str, _Expert]  # by the tensors on disk


@dataclass(frozen=True)
class _Change:
    """What happens to one of the model's tensors."""

    scale: float
    flipped: bool = False  # the model's tensor is [in, out]
    expert: _Expert | None = None
    tensors: dict[str, str] = field(default_factory=dict)  # the adapter's, by kind


class Adapter:
    """The adapter in a folder; `fit` checks that a model can have it. Raises `UserError` if it cannot be merged."""

    def __init__(self, folder: Path):
        self.folder, self._file = folder, folder / TENSORS
        self._options = AdapterOptions.read(folder)
        if reading.kind(folder / _PICKLE) and not reading.kind(self._file):
            problem = "pickle files can run code when they are read, so they are refused"
            raise UserError(f"{folder / _PICKLE}: {problem}; valid: {TENSORS} (written by save_pretrained)")
        self._tensors = TensorFiles(folder, [self._file])
        self._modules: dict[str, dict[str, str]] = {}  # module -> kind -> tensor
        self._changes: dict[str, _Change] = {}  # by the model's tensor
        for name in self._tensors.shapes:
            if not (found := _TENSOR.fullmatch(name)):
                raise self._refusal([name])
            module, kind = found["module"], found["kind"].removeprefix("modules_to_save.")
            option = {"lora_magnitude_vector": "use_dora", "lora_B.bias": "lora_bias"}.get(kind)
            if option and not self._options.get(option):
                raise self._refusal([name], f"{option} true in {SETTINGS}, without which peft ignores it")
            if kind.partition(".")[0] != _BEFORE:
                self._modules.setdefault(module, {})[kind] = name
        if not self._modules:
            raise UserError(f"{self._file}: holds no tensors of an adapter; valid: those that peft writes")

    @classmethod
    def find(cls, folder: Path, adapter: Path | None) -> "Adapter | None":
        """The `adapter` given by the user for the model in a folder, or the one beside the model."""
        beside = reading.is_file(folder / SETTINGS)
        if beside and not reading.is_file(folder / "config.json"):
            base = AdapterOptions.read(folder).get("base_model_name_or_path")
            named = f", {base}" if isinstance(base, str) and base else ""
            raise UserError(
                f"PATH {folder} holds only an adapter, not its base model{named}; valid: the base model, with "
                f"--adapter {folder}"
            )
        if beside and adapter:
            raise UserError(f"--adapter {adapter}: PATH {folder} holds an adapter too; valid: one adapter")
        if adapter and not reading.is_file(adapter / SETTINGS):
            raise UserError(f"--adapter {adapter}: no {SETTINGS} found; valid: a folder written by peft")
        return cls(adapter or folder) if adapter or beside else None

    def unties(self, exchange: Exchange, head: str) -> bool:
        """Whether it makes embedding and output, which the base model shares, differ."""
        copies = [*exchange.copies, *exchange.heads[head].copies]
        if not copies or self._options.get("ensure_weight_tying"):
            return False
        table = exchange.shared["table"].name
        names = {name.split(".")[-2] for name in (table, *copies)}
        kinds = {(module, kind) for module, tensors in self._modules.items() for kind in tensors}
        ends = {(module.rpartition(".")[2], kind) for module, kind in kinds} - {(table.split(".")[-2], _TOKENS)}
        return any(module in names for module, _ in ends)

    def fit(self, places: TensorPlaces, config: ModelConfig) -> None:
        """Find the model's tensor for each of its own; raises `UserError` if there is none, or for its shape."""
        shapes = places.shapes(config)
        blocks = [place for place in places.blocks.values() if len(place.dims) == 2 and not place.turned]
        flipped = {name for place in blocks for _, name in place.tensors(config)}
        spelled = places.spelling({f"{module}.weight" for module in self._modules})
        known = {spelled(name): name for name in shapes}
        fused = _fused(places, config)
        experts: dict[str, list[str]] = {module: [] for module in self._modules}
        for name in fused:
            for module in (name.rpartition(".")[0], f"{name.rpartition('.')[0]}.base_layer"):
                experts.get(module, []).append(name)
        targets = self._options.targets([*experts], [f"{module}.weight" for module in experts] + [*fused])
        expected: dict[str, _Shape] = {}
        for module, tensors in self._modules.items():
            if experts[module]:
                chosen = {name: (*targets[name], fused[name]) for name in experts[module] if name in targets}
                expected |= self._fit_experts(tensors, chosen.values())
                continue
            target = targets.get(f"{module}.weight", targets.get(module))
            scale, rank = target or (0.0, 1)
            of_table = "lora_embedding_A" in tensors
            for kind, tensor in tensors.items():
                key = f"{module}.{'bias' if kind.endswith('bias') else 'weight'}"
                if key in places.copies and self._options.get("ensure_weight_tying"):
                    self._check_same(tensor, kind, places.copies[key].rpartition(".")[0])
                    continue
                if not target and kind.startswith(("lora", "base")):
                    raise self._refusal([tensor], f"only what {SETTINGS} selects, peft ignores the rest")
                name = known.get(key, "")
                flips = name in flipped or of_table
                change = self._changes.setdefault(name, _Change(scale, flips))
                if not name or kind in change.tensors:
                    raise self._refusal([tensor])
                change.tensors[kind] = tensor
                shape = shapes[name][::-1] if flips and kind.startswith("lora") else shapes[name]
                expected |= self._shapes_of(module, kind, tensor, rank, shape)
        self._tensors.check(expected, f"an adapter of rank {self._options.rank}", by=SETTINGS)

    def _fit_experts(self, tensors: dict[str, str], chosen: Iterable[tuple[float, int, _Fused]]) -> dict[str, _Shape]:
        """The same for an adapter of one of these fused tensors, each with scale and rank. Only sizes tell which."""
        shapes = {kind: self._tensors.shapes[tensor] for kind, tensor in tensors.items()}
        for scale, rank, fused in chosen:
            ranks = rank * fused.experts
            wanted = {"lora_A.weight": (ranks, fused.inputs), "lora_B.weight": (fused.outputs, ranks)}
            if shapes == wanted and not self._changes.keys() & fused.parts.keys():
                changes = {name: _Change(scale, expert=part, tensors=tensors) for name, part in fused.parts.items()}
                self._changes |= changes
                return {tensors[kind]: shape for kind, shape in wanted.items()}
        raise self._refusal([*tensors.values()])

    def _check_same(self, tensor: str, kind: str, module: str) -> None:
        """Check that a tensor of a tied module is the one of the `module` that has the weight."""
        transposed = {"lora_A.weight": "lora_embedding_B", "lora_B.weight": "lora_embedding_A"}.get(kind)
        other = self._modules.get(module, {}).get(transposed or kind)
        same = self._tensors.read(other) if other else np.zeros(0)
        if not np.array_equal(self._tensors.read(tensor), same.T if transposed else same):
            raise self._refusal([tensor], f"the same as of {module}, by ensure_weight_tying")

    def _shapes_of(self, module: str, kind: str, tensor: str, rank: int, shape: _Shape) -> dict[str, _Shape]:
        """The shapes that an adapter's tensor and its counterpart must have, if the module's is [out, in]."""
        if kind == _TOKENS:
            return {tensor: (len(self._options.tokens(module, shape[0])), shape[1])}
        if not kind.startswith("lora") or kind == "lora_B.bias":
            return {tensor: shape}
        if kind == "lora_magnitude_vector":
            return {tensor: shape[:1]}
        a, b = (re.sub(r"(lora_|lora_embedding_)[AB](\.weight|$)", rf"\g<1>{x}\2", tensor) for x in "AB")
        magnitude = {re.sub(r"lora_(embedding_)?A(\.weight|$)", "lora_magnitude_vector", a): shape[:1]}
        return {a: (rank, shape[1]), b: (shape[0], rank)} | (magnitude if self._options.get("use_dora") else {})

    def applied(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the model, with its change if there is one."""
        if name not in self._changes:
            return tensor
        change = self._changes[name]
        arrays = {kind.removeprefix("base_layer."): self._tensors.read(key) for kind, key in change.tensors.items()}
        scale = np.float32(change.scale)
        if name.endswith("bias"):
            return arrays.get("bias", tensor) + scale * arrays.get("lora_B.bias", np.float32(0))
        tensor = arrays.get("weight", tensor)
        a_RI, b_OR = (arrays.get(f"lora_{x}.weight", arrays.get(f"lora_embedding_{x}")) for x in "AB")
        if a_RI is not None and b_OR is not None:
            w_OI = (tensor.T if change.flipped else tensor) + scale * _product(a_RI, b_OR, change.expert)
            if "lora_magnitude_vector" in arrays:
                w_OI *= (arrays["lora_magnitude_vector"] / np.linalg.norm(w_OI, axis=1))[:, None]
            tensor = w_OI.T if change.flipped else w_OI
        if _TOKENS in arrays:
            match = _TENSOR.fullmatch(change.tensors[_TOKENS])
            assert match
            tensor = tensor.copy()
            tensor[self._options.tokens(match["module"], len(tensor))] = arrays[_TOKENS]
        return tensor

    def _refusal(
        self, names: Sequence[str], valid: str = "what peft writes for the modules of this model"
    ) -> UserError:
        return UserError(f"{self._file}: holds {listed(names)}; valid: {valid}")


def _fused(places: TensorPlaces, config: ModelConfig) -> dict[str, _Fused]:
    """The tensors of all of a layer's experts, by name; some are so on disk, too: [experts, in, out]."""
    shapes = places.shapes(config)
    tensors = {
        name: _Fused(*shape, {name: _Expert(shape[0])})
        for name, shape in shapes.items()
        if len(shape) == 3 and not name.endswith(".weight")
    }
    for fused, experts in places.fused_tensors(config).items():
        if experts[0][0] not in shapes:
            continue  # the layer is dense
        rows, inputs = shapes[experts[0][0]]
        parts = {
            name: _Expert(len(experts), expert, slice(rows * index, rows * (index + 1)))
            for expert, names in enumerate(experts)
            for index, name in enumerate(names)
        }
        tensors[fused] = _Fused(len(experts), inputs, rows * len(experts[0]), parts)
    return tensors


def _product(a_RI: Tensor, b_OR: Tensor, expert: _Expert | None) -> Tensor:
    if not expert:
        return b_OR @ a_RI
    a_ERI, b_ORE = a_RI.reshape(expert.experts, -1, a_RI.shape[1]), b_OR.reshape(len(b_OR), -1, expert.experts)
    if expert.number is None:
        every: Tensor = np.einsum("ore,eri->eio", b_ORE, a_ERI, optimize=True)
        return every
    product: Tensor = b_ORE[expert.rows, :, expert.number] @ a_ERI[expert.number]
    return product
