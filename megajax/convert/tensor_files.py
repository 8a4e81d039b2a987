"""The tensors in a folder's safetensors files, one file or several with an index.

Other formats of weights are never read: they are pickles, which can run any code.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.errors import UserError
from megajax.host import reading

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_INDEX_BYTES = 1 << 25  # a line of some hundred for each tensor
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}  # ours -> theirs


class TensorFiles:
    """Tensors by name. Only the files' headers are read at once; a tensor is read when it is asked for.

    Args:
        folder: where the files are.

    Attributes:
        folder: as given.
        shapes: of all tensors, by name.
    """

    def __init__(self, folder: Path):
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.folder = folder
        for path in _find(folder):
            self._open(path)

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            reading.open_file(path).close()
            file = safe_open(path, framework="np")
        except OSError as error:
            reason = "it does not exist" if not reading.kind(path) else error.strerror or str(error)
            raise UserError(f"{path}: cannot be read: {reason}; valid: a readable file") from None
        except SafetensorError as error:
            raise UserError(f"{path}: damaged, or not a safetensors file: {error}; valid: a whole one") from None
        for name in file.keys():  # noqa: SIM118  # not a dict
            if name in self._files:
                raise UserError(f"{path}: {name} is in {self._paths[name].name} too; valid: every tensor once")
            self._files[name], self._paths[name] = file, path
            self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def check(self, shapes: Mapping[str, tuple[int, ...]], kind: str) -> None:
        """Check that the tensors of these names are there in these shapes, in fp32, fp16 or bf16. `kind` is the model
        that has them all, for error messages.
        """
        missing = [name for name in shapes if name not in self.shapes]
        if missing:
            raise UserError(f"{self.folder}: {_list(missing)} missing from the safetensors; valid: all of {kind}")
        for name, shape in shapes.items():
            path = self._paths[name]
            if self.shapes[name] != shape:
                raise UserError(
                    f"{path}: {name} has shape {list(self.shapes[name])}; valid: {list(shape)}, by config.json"
                )
            dtype = self._files[name].get_slice(name).get_dtype()
            if dtype not in DTYPES.values():
                raise UserError(f"{path}: {name} has dtype {dtype}; valid: {', '.join(DTYPES.values())}")

    def check_no_others(self, names: set[str], architecture: str) -> None:
        """Check that there are no tensors of other names than those of this class of transformers."""
        others = sorted(self.shapes.keys() - names)
        if others:
            raise UserError(f"{self._paths[others[0]]}: holds {_list(others)}; valid: only what a {architecture} has")

    def dtype(self, names: Collection[str]) -> str:
        """What the tensors of these names have in common, as in `DTYPES`; fp32, which holds every number of the others,
        where they differ."""
        there = {self._files[name].get_slice(name).get_dtype() for name in names}
        return next((ours for ours, theirs in DTYPES.items() if there == {theirs}), "fp32")

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor in fp32."""
        tensor = self._files[name].get_tensor(name).astype(np.float32)
        if not np.isfinite(tensor).all():
            raise UserError(f"{self._paths[name]}: {name} has values that are NaN or infinite; valid: finite numbers")
        return tensor


def _list(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _find(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights."""
    if reading.is_file(folder / WEIGHTS):
        return [folder / WEIGHTS]
    if reading.is_file(folder / INDEX):
        return _shards(folder / INDEX)
    pickles = sorted(file for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise UserError(
            f"{pickles[0]}: a pickle, which can run any code when it is read, so it is not; "
            f"valid: {WEIGHTS} (save_pretrained of transformers writes it)"
        )
    raise UserError(f"{folder}: no weights there; valid: {WEIGHTS}, or {INDEX} and the files that it names")


def _shards(index: Path) -> list[Path]:
    content = reading.read_json(index, _INDEX_BYTES)
    try:
        names = set(content["weight_map"].values())
        plain = all(Path(name).name == name and name.endswith(".safetensors") for name in names)
    except (KeyError, TypeError, AttributeError):
        plain = False
    if not plain:
        raise UserError(f"{index}: not an index of safetensors; valid: a weight_map from tensors to .safetensors files")
    return [index.parent / name for name in sorted(names)]
