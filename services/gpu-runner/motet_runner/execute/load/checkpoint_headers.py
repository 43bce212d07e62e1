"""The weights of a model folder: one safetensors file, or several that an index lists.

`Checkpoint` reads only the headers, and refuses a folder with files of different models before any weight is read.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from motet.errors import ModelFileDamaged, ModelFolderError

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
"""Floating-point types of at most eight bits are missing: their weights are quantised."""

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in the header of a file."""

    name: str
    """In the file"""
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Where the tensor's bytes begin in the file"""
    bytes: int


class Checkpoint:
    """The headers of all files. Raises ModelFolderError if a file is missing or damaged, or of another model."""

    def __init__(
        self, folder: Path, dtype: str | None = None, *, name_in_model: Callable[[str], str | None] | None = None
    ) -> None:
        """`dtype`: the type of the weights in config.json, by torch's name. `name_in_model`: what the model calls a
        tensor; None: the model has no such tensor, which is not read then."""
        self.folder = folder
        index = _read_index(folder)
        names = sorted(set(index.values())) if index is not None else [ONE_FILE]
        self.tensors: dict[str, TensorEntry] = {}
        self.stored: str | None = None
        """The floating-point type with the most bytes, as safetensors names it; None: no weight is of such a type."""
        for file in names:
            for entry in _read_header(folder / file):
                other = self.tensors.setdefault(entry.name, entry)
                if other is not entry:
                    raise ModelFolderError(
                        f"{folder}: {other.file.name} and {file} both have the tensor {entry.name}: they are of two "
                        f"models. Copy all files of one model there again."
                    )
        if index is not None:
            self._check_index(index)
        if name_in_model is not None:
            self.tensors = self._renamed(name_in_model)
        self._check_dtypes(dtype)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.tensors.values())

    def bytes_as(self, dtype: torch.dtype) -> int:
        """The bytes of all weights once floating-point numbers have this type."""
        return sum(
            math.prod(entry.shape) * dtype.itemsize if entry.dtype in FLOATS else entry.bytes
            for entry in self.tensors.values()
        )

    def check_shapes(self, model: torch.nn.Module) -> None:
        """Compare the shapes with those of a model without weights. Tensors that transformers renames or merges are
        compared when they are loaded."""
        for name, wanted in model.state_dict().items():
            entry = self.tensors.get(name)
            if entry is not None and entry.shape != tuple(wanted.shape):
                raise other_shape(self.folder, entry.file.name, name, entry.shape, tuple(wanted.shape))

    def _renamed(self, name_in_model: Callable[[str], str | None]) -> dict[str, TensorEntry]:
        found: dict[str, TensorEntry] = {}
        for entry in self.tensors.values():
            name = name_in_model(entry.name)
            if name is not None and found.setdefault(name, entry) is not entry:
                raise ModelFolderError(
                    f"{self.folder}: {found[name].name} and {entry.name} are the same weight of the model. Save the "
                    "model there again with save_pretrained()."
                )
        return found

    def _check_index(self, index: dict[str, str]) -> None:
        for name, file in index.items():
            entry = self.tensors.get(name)
            if entry is None or entry.file.name != file:
                raise ModelFolderError(
                    f"{self.folder}: {INDEX} says that {file} has the tensor {name}, but {file} does not have it. They "
                    f"are of two models: copy {file} and {INDEX} there again."
                )

    def _check_dtypes(self, configured: str | None) -> None:
        """Refuses a file without any tensor of the configured type (or of the most frequent type, if no file has the
        configured one). A few tensors of another type, such as a norm's, are usual."""
        sizes: dict[Path, Counter[str]] = {}
        for entry in self.tensors.values():
            if entry.dtype not in DTYPES:
                raise quantised(entry)
            if entry.dtype in FLOATS:
                sizes.setdefault(entry.file, Counter())[entry.dtype] += entry.bytes
        total = sum(sizes.values(), Counter[str]())
        self.stored = total.most_common(1)[0][0] if total else None
        by_torch = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
        expected = by_torch.get(configured or "")
        if expected not in total:
            expected = self.stored
        for file, found in sizes.items():
            if expected not in found:
                raise ModelFolderError(
                    f"{self.folder}: {file.name} has {', '.join(found)} weights and the other files have {expected}: "
                    f"they are of two models. Copy {file.name} there again."
                )


def quantised(entry: TensorEntry) -> ModelFolderError:
    return ModelFolderError(
        f"{entry.file.parent}: {entry.file.name} has {entry.name} as {entry.dtype}. Motet does not serve "
        "weights of this type yet. Use the unquantised weights."
    )


def other_shape(
    folder: Path, file: str, name: str, found: tuple[int, ...], wanted: tuple[int, ...]
) -> ModelFolderError:
    return ModelFolderError(
        f"{folder}: {file} has {name} with other shapes than config.json says ({list(found)}, not {list(wanted)}): "
        f"they are of two models. Copy {file} and config.json of the same model there."
    )


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor → file. None if the folder has ONE_FILE: like transformers, we then ignore an index."""
    path = folder / INDEX
    if (folder / ONE_FILE).is_file():
        return None
    if not path.is_file():
        raise ModelFolderError(
            f"{folder}: the model could not be loaded: it has neither {ONE_FILE} nor {INDEX}. Save the model there "
            "again with save_pretrained()."
        )
    try:
        index = json.loads(path.read_bytes())["weight_map"]
        files = set(index.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelFolderError(
            f"{folder}: {INDEX} has no weight_map. Copy it there again, or save the model with save_pretrained()."
        ) from None
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelFolderError(f"{folder}: {INDEX} names {file!r}, which is not a file beside it.")
        if not (folder / file).is_file():
            raise ModelFolderError(f"{folder}: {file} is missing, and {INDEX} names it. Copy it there.")
    return dict(index)


def _read_header(path: Path) -> Iterator[TensorEntry]:
    try:
        with safe_open(path, framework="pt"):  # checks that the header and the file's size agree
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, ValueError) as error:
        raise ModelFileDamaged(f"{path.parent}: {path.name} is damaged: {error}. Copy it there again.") from error
    except OSError as error:
        raise ModelFolderError(f"{path.parent}: {path.name} can't be read: {error.strerror}.") from error
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield TensorEntry(name, path, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
