"""The tensors in a folder's safetensors files: a single file, or several with an index, as transformers writes them.

Other formats of weights are never read: they are pickles, which can run arbitrary code.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from megajax.core.errors import Damaged, UserError
from megajax.host import reading

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}  # ours -> theirs
TORCH_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # ours -> names in config.json
SHARD_BYTES = 5 * 10**9  # most bytes of tensors in a file, unless a single tensor has more
_INDEX_BYTES = 1 << 25  # an index has a line of about a hundred bytes per tensor
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_NUMPY = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
_ALIGNMENT = 8  # of the header, which is padded with blanks
# Parts of names that PyTorch's wrappers for several devices, compilation and recomputation put before or in them.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# In the name of any tensor -> what the files probably are.
_SIGNS = (
    (r"\.lora_|^base_model\.model\.", "a peft model whose adapters are not merged (merge_and_unload merges them)"),
    (
        r"_(blocks|scales)$|\.(qweight|qzeros|SCB|absmax|weight_scale|weight_scale_inv|weight_packed)$",
        "quantized weights",
    ),
    (r"(^|\.)(vision_|visual\.|image_|multi_modal_projector)", "a model of images and text"),
    (r"^v_head\.", "a model with the value head of TRL"),
    (r"^layers\.\d+\.(attention|feed_forward)\.|^tok_embeddings\.", "the own format of Meta or Mistral"),
    (r"^(embedding|decoder|language_model)\..*(word_embeddings|layers\.\d+\.self_attention\.)", "a Megatron-LM model"),
    (r"\.self_attn\.(kv_a_proj|q_a_proj|kv_b_proj)", "a DeepSeek, with latent attention"),
    (r"\.(qkv_proj|query_key_value|Wqkv)\.", "a class with fused query, key and value"),
    (r"\.shared_experts?\.", "a mixture with shared experts"),
    (r"\.block\.\d+\.layer\.\d+\.SelfAttention\.", "a T5"),
    (r"^score\.", "a model for classifying sequences"),
)


class _Stored(NamedTuple):
    """Where a tensor is."""

    path: Path
    file: Any
    name: str  # there
    part: tuple[int, slice] | slice | None = None  # its own part of that one: an index, and rows
    joined: "tuple[_Stored, ...]" = ()  # of several, one after the other
    scales: "_Stored | None" = None  # where those of its blocks are, if it is in MXFP4


class TensorFiles:
    """Tensors by name, without the names of wrappers. Only the files' headers are read at first; a tensor is read when
    it is requested.

    Attributes:
        folder: where the files are.
        shapes: of all tensors, by name.
    """

    def __init__(self, folder: Path, files: Iterable[Path] | None = None):
        self._files: dict[str, _Stored] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.folder = folder
        for path in _find(folder) if files is None else files:
            self._open(path)

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            reading.open_file(path).close()
            file = safe_open(path, framework="np")
        except (OSError, SafetensorError) as error:
            of_system = isinstance(error, OSError) and error.strerror
            why = of_system or f"damaged, or not a safetensors file: {error}"
            raise Damaged(path, why, "a complete safetensors file") from None
        for stored in file.keys():  # noqa: SIM118  # not a dict
            name = ".".join(part for part in stored.split(".") if part not in _WRAPPERS)
            if name in self._files:
                raise UserError(f"{path}: {name} is in {self._files[name].path.name} too; valid: every tensor once")
            self._files[name] = _Stored(path, file, stored)
            self.shapes[name] = tuple(file.get_slice(stored).get_shape())

    def share(self, name: str, other: str) -> None:
        """Give a tensor a further name."""
        self._files[name], self.shapes[name] = self._files[other], self.shapes[other]

    def split(self, name: str, parts: Sequence[Sequence[str]]) -> None:
        """Replace a tensor by its parts, which have these names: by index in its first dim, and then one after the
        other in the second."""
        stored, shape = self._files.pop(name), self.shapes.pop(name)
        if len(shape) != 3 or shape[0] != len(parts) or shape[1] % len(parts[0]):
            valid = f"{len(parts)} experts in its first dim, by config.json"
            raise UserError(f"{stored.path}: {name} has shape {list(shape)}; valid: {valid}")
        rows = shape[1] // len(parts[0])
        for index, names in enumerate(parts):
            for number, part in enumerate(names):
                own = slice(rows * number, rows * (number + 1))
                self._files[part], self.shapes[part] = stored._replace(part=(index, own)), (rows, shape[2])

    def divide(self, whole: str, rows: Mapping[str, int]) -> None:
        """Replace a tensor, or those with these names one after the other, by others of these rows. What does not add
        up stays."""
        names = [name for name in (whole, *rows) if name in self._files]
        shapes = [self.shapes[name] for name in names]
        there = sum(math.prod(shape[:1]) for shape in shapes)
        if len({shape[1:] for shape in shapes}) != 1 or there != sum(rows.values()):
            return
        stored, first = tuple(self._files.pop(name) for name in names), 0
        for name in names:
            self.shapes.pop(name)
        for name, number in rows.items():
            part, first = slice(first, first + number), first + number
            self._files[name] = stored[0]._replace(joined=stored, part=part)
            self.shapes[name] = number, *shapes[0][1:]

    def widen(self, name: str) -> None:
        """Replace MXFP4 blocks and scales, [E, O, G, 16] and [E, O, G] bytes, by the weights [E, I, O] that they stand
        for: in a block 32 numbers of 4 bits, two in a byte, with one scale."""
        blocks, scales = (self._files.pop(f"{name}_{part}") for part in ("blocks", "scales"))
        shape, of_scales = (self.shapes.pop(f"{name}_{part}") for part in ("blocks", "scales"))
        actual = f"{list(shape)} {_dtype(blocks)} with scales {list(of_scales)} {_dtype(scales)}"
        if len(shape) != 4 or shape[3] != 16 or of_scales != shape[:3] or {*map(_dtype, (blocks, scales))} != {"U8"}:
            valid = "16 bytes (U8) a block, and one for its scale"
            raise UserError(f"{blocks.path}: {name}_blocks has shape {actual}; valid: {valid}")
        self._files[name], self.shapes[name] = blocks._replace(scales=scales), (shape[0], 32 * shape[2], shape[1])

    def check(self, shapes: Mapping[str, tuple[int, ...]], kind: str, by: str = _CONFIG) -> None:
        """Check that these tensors exist with these shapes, which are those `by` a file, in fp32, fp16 or bf16. `kind`
        is what error messages call a model that has them all."""
        missing = [name for name in shapes if name not in self.shapes]
        if missing:
            source = self._likely_source() if by == _CONFIG else ""  # adapters are by their own file
            problem = f"{listed(missing)} missing from the safetensors{source}"
            raise UserError(f"{self.folder}: {problem}; valid: all of {kind}")
        for name, shape in shapes.items():
            stored = self._files[name]
            if self.shapes[name] != shape:
                raise UserError(
                    f"{stored.path}: {name} has shape {list(self.shapes[name])}; valid: {list(shape)}, by {by}"
                )
            if (dtype := _dtype(stored)) not in DTYPES.values():
                raise UserError(f"{stored.path}: {name} has dtype {dtype}; valid: {', '.join(DTYPES.values())}")

    def check_no_others(self, names: set[str], architecture: str) -> None:
        """Check that there are no tensors other than those of this transformers class."""
        if others := sorted(self.shapes.keys() - names):
            path, source = self._files[others[0]].path, self._likely_source()
            raise UserError(f"{path}: holds {listed(others)}{source}; valid: only what a {architecture} has")

    def _likely_source(self) -> str:
        """What error messages say about tensors that are not those of a model."""
        kinds = (kind for sign, kind in _SIGNS if any(re.search(sign, name) for name in self.shapes))
        return next((f", which look like {kind}" for kind in kinds), "")

    def dtype(self, name: str) -> str:
        """The dtype of a tensor that has one of `DTYPES`, by its name there."""
        return next(ours for ours, theirs in DTYPES.items() if theirs == _dtype(self._files[name]))

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor, in fp32."""
        stored = self._files[name]
        if stored.joined:
            raw = np.concatenate([each.file.get_tensor(each.name) for each in stored.joined])[stored.part]
        elif stored.part:
            raw = stored.file.get_slice(stored.name)[stored.part]
        else:
            raw = stored.file.get_tensor(stored.name)
        tensor: npt.NDArray[np.float32] = raw.astype(np.float32)
        if stored.scales:
            tensor = _widened(raw, stored.scales.file.get_tensor(stored.scales.name))
        if not np.isfinite(tensor).all():
            raise UserError(f"{stored.path}: {name} has values that are NaN or infinite; valid: finite numbers")
        return tensor


def _dtype(stored: _Stored) -> str:
    """MXFP4 counts as the smallest dtype that holds all its numbers."""
    return "BF16" if stored.scales else str(stored.file.get_slice(stored.name).get_dtype())


def _widened(blocks_EOG: npt.NDArray[np.uint8], scales_EOG: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The numbers of MXFP4 blocks, the lower half of each byte first (OCP Microscaling Formats 1.0)."""
    codes = np.stack([blocks_EOG & 15, blocks_EOG >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn)
    wide = codes.reshape(*scales_EOG.shape, 32).astype(np.float32)
    wide *= scales_EOG.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
    return wide.reshape(*scales_EOG.shape[:2], -1).swapaxes(1, 2)


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _find(folder: Path) -> list[Path]:
    """The safetensors files that contain the weights."""
    if reading.is_file(folder / WEIGHTS):
        return [folder / WEIGHTS]
    if reading.is_file(folder / INDEX):
        return shards(folder / INDEX)
    pickles = sorted(file for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise UserError(
            f"{pickles[0]}: pickle files can run code when they are read, so they are refused; valid: "
            f"{WEIGHTS} (written by save_pretrained)"
        )
    raise UserError(f"{folder}: no weights found; valid: {WEIGHTS}, or {INDEX} and the files that it names")


def shards(index: Path) -> list[Path]:
    """The files that an index names, some of which may not exist."""
    content = reading.read_json(index, _INDEX_BYTES)
    try:
        names = set(content["weight_map"].values())
        plain = all(Path(name).name == name and name.endswith(".safetensors") for name in names)
    except (KeyError, TypeError, AttributeError):
        plain = False
    if not plain:
        raise UserError(f"{index}: not an index of safetensors; valid: a weight_map from tensors to .safetensors files")
    return [index.parent / name for name in sorted(names)]


def write_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, npt.NDArray[np.float32]]],
    dtypes: Mapping[str, str],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the files with a model's tensors, each in its dtype from `DTYPES`. Tensors are written as they come, in any
    order; the library's own function needs a whole file's at once."""
    sizes = {name: math.prod(shape) * _NUMPY[dtypes[name]].itemsize for name, shape in shapes.items()}
    shards: list[list[str]] = [[]]  # files are filled one after the other
    room = shard_bytes
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    files = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    files = files if shards[1:] else [WEIGHTS]
    with contextlib.ExitStack() as stack:
        places: dict[str, tuple[IO[bytes], int]] = {}  # tensor -> its file and offset
        file = folder
        try:
            for shard, names in zip(files, shards, strict=True):
                file = folder / shard
                begun = stack.enter_context(file.open("wb"))
                header, starts = _header({name: (DTYPES[dtypes[name]], shapes[name], sizes[name]) for name in names})
                begun.write(header)
                places |= {name: (begun, start) for name, start in starts.items()}
            for name, tensor in tensors:
                written, start = places[name]
                file = Path(written.name)
                written.seek(start)
                written.write(_converted(name, tensor, dtypes[name]).data)
            for written, _ in places.values():
                written.flush()
            if shards[1:]:
                file = folder / INDEX
                metadata = {"total_parameters": sum(map(math.prod, shapes.values())), "total_size": sum(sizes.values())}
                weight_map = {name: Path(places[name][0].name).name for name in sorted(places)}
                index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2)
                file.write_text(index + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{file}: cannot be written: {error.strerror}; valid: a writable place with free space"
            ) from None


def _header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> tuple[bytes, dict[str, int]]:
    """The start of a file for tensors with these dtypes, shapes and sizes: the header's length in eight bytes, then the
    header in JSON (https://huggingface.co/docs/safetensors). Also returns the offset of each tensor."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        starts[name], end = end, end + size
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def _converted(name: str, tensor: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor in this dtype."""
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(tensor).astype(_NUMPY[dtype], copy=False)
    if dtype == "fp16" and not np.isfinite(array).all():
        raise UserError(f"--dtype fp16: {name} has numbers beyond {np.finfo(np.float16).max:g}; valid: bf16 or fp32")
    return array.reshape(-1).view(np.uint8)
