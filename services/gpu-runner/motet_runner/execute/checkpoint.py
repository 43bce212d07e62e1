"""The weights of a model folder: one safetensors file, or several that an index lists.

`Checkpoint` reads the headers alone and refuses a folder whose files do not belong together, before a weight is read.
`CheckpointReader` then lends transformers a state dict of tensors that are still on disk. Transformers renames, merges
and ties them as `from_pretrained` always does, and reads each once, in its threads: our `StoredTensor` reads by
`preadv`, straight into memory of the type and on the device that the model wants.

Transformers' own reader maps the files. That keeps the weights in the page cache, where a file that is cut later kills
the process; and when the type changes, as from bfloat16 to float32, it holds both copies.
"""

import json
import math
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from motet.errors import ModelFolderError
from motet_runner.interface import LoadProgress

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"

STAGING_BYTES = 8 << 20
"""What a thread reads at once when the bytes are converted or sent to another device. It bounds the memory beside the
weights."""

CHECKED_NUMBERS = 1 << 17
"""How many weights are checked at once. To sum bfloat16 numbers torch copies them to float32: that is little then."""

PROGRESS_SECONDS = 1.0

MAPPED_BYTES = 128 << 10
"""Tensors of at least this size get memory of their own from the operating system, when they are on a CPU."""


def ignore_progress(read_bytes: int, total: int) -> None:
    pass


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
"""Without the types of eight bits and less that only quantised weights have."""

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in the header of a file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Where its bytes begin in the file."""
    bytes: int


class Checkpoint:
    """The headers of all files. Raises ModelFolderError if a file is missing or damaged, or if they do not fit."""

    def __init__(self, folder: Path, dtype: str | None = None) -> None:
        """`dtype`: the type of the weights by config.json, in the words of torch."""
        self.folder = folder
        index = _read_index(folder)
        names = sorted(set(index.values())) if index is not None else [ONE_FILE]
        self.tensors: dict[str, TensorEntry] = {}
        self.stored: str | None = None
        """The type of most weights, as the files call it; None: there are none."""
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
        self._check_dtypes(dtype)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.tensors.values())

    def bytes_as(self, dtype: torch.dtype) -> int:
        """Of all weights once floating-point numbers have this type."""
        return sum(
            math.prod(entry.shape) * dtype.itemsize if entry.dtype in FLOATS else entry.bytes
            for entry in self.tensors.values()
        )

    def check_shapes(self, model: torch.nn.Module) -> None:
        """Compare with a model without weights. A tensor that transformers renames or merges is compared later, when
        it is loaded."""
        for name, wanted in model.state_dict().items():
            entry = self.tensors.get(name)
            if entry is not None and entry.shape != tuple(wanted.shape):
                raise other_shape(self.folder, entry.file.name, name, entry.shape, tuple(wanted.shape))

    def _check_index(self, index: dict[str, str]) -> None:
        for name, file in index.items():
            entry = self.tensors.get(name)
            if entry is None or entry.file.name != file:
                raise ModelFolderError(
                    f"{self.folder}: {INDEX} says that {file} has the tensor {name}, and it does not. They are of two "
                    f"models: copy {file} and {INDEX} there again."
                )

    def _check_dtypes(self, configured: str | None) -> None:
        """One type in all files. A few tensors of another, such as a norm's, are usual beside the others, so a file is
        refused only if all of it has other types than the rest."""
        sizes: dict[Path, Counter[str]] = {}
        for entry in self.tensors.values():
            if entry.dtype not in DTYPES:
                raise _quantised(entry)
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


def _quantised(entry: TensorEntry) -> ModelFolderError:
    return ModelFolderError(
        f"{entry.file.parent}: {entry.file.name} has {entry.name} as {entry.dtype}: it is of a quantised model, which "
        "Motet does not serve yet. Use the unquantised weights."
    )


def other_shape(
    folder: Path, file: str, name: str, found: tuple[int, ...], wanted: tuple[int, ...]
) -> ModelFolderError:
    return ModelFolderError(
        f"{folder}: {file} has {name} with other shapes than config.json says ({list(found)}, not {list(wanted)}): "
        f"they are of two models. Copy {file} and config.json of the same model there."
    )


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor → file. None if the model has one file, which transformers, too, prefers to an index."""
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
        raise ModelFolderError(f"{path.parent}: {path.name} is damaged: {error}. Copy it there again.") from error
    except OSError as error:
        raise ModelFolderError(f"{path.parent}: {path.name} can't be read: {error.strerror}.") from error
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield TensorEntry(name, path, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a state dict that is still on disk. Transformers reads it as it reads the slices of safetensors: by
    `stored[...]` and `.to(device, dtype)`, in one of its threads."""

    entry: TensorEntry
    reader: "CheckpointReader" = field(repr=False)

    def __getitem__(self, everything: EllipsisType) -> Self:
        assert everything is ...
        return self

    def to(self, *, device: object, dtype: torch.dtype | None) -> torch.Tensor:  # noqa: ARG002 - transformers gives it
        """The tensor. The model wants `dtype`. The device is the reader's: transformers knows only the CPU unless
        accelerate is installed."""
        return self.reader.read(self.entry, dtype)


class CheckpointReader:
    """Open files. When the block ends, no thread reads, and the files are closed."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        on_progress: LoadProgress,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._on_progress = on_progress
        self._clock = clock
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._local = threading.local()
        self._read_bytes = 0
        self._total = checkpoint.bytes
        self._reported = clock()
        self._ended = False

    def __enter__(self) -> Self:
        try:
            for file in {entry.file for entry in self._checkpoint.tensors.values()}:
                self._files[file] = os.open(file, os.O_RDONLY)
        except OSError as error:
            self.__exit__(None, None, None)
            raise ModelFolderError(f"{error.filename} can't be read: {error.strerror}.") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended = True
        for thread in self._threads - {threading.current_thread()}:
            thread.join()  # transformers has told its threads to end, and waits for none
        for descriptor in self._files.values():
            with suppress(OSError):
                os.close(descriptor)
        if error is None and self._total:
            self._on_progress(self._total, self._total)

    def state_dict(self) -> dict[str, Any]:
        return {name: StoredTensor(entry, self) for name, entry in self._checkpoint.tensors.items()}

    def read(self, entry: TensorEntry, dtype: torch.dtype | None) -> torch.Tensor:
        self._threads.add(threading.current_thread())
        stored, wanted = DTYPES[entry.dtype], dtype or DTYPES[entry.dtype]
        if wanted.is_floating_point and not stored.is_floating_point:
            raise _quantised(entry)
        result = _empty(entry.shape, wanted, self._device)
        flat = result.view(-1)
        if wanted == stored and self._device.type == "cpu":
            self._fill(flat, entry, 0)
            _refuse_what_is_not_finite(entry, flat)
            return result
        staging = self._staging().view(stored)
        for first in range(0, flat.numel(), len(staging)):
            part = staging[: flat.numel() - first]
            self._fill(part, entry, first * stored.itemsize)
            _refuse_what_is_not_finite(entry, part)
            converted = flat[first : first + len(part)].copy_(part)
            if wanted == torch.float16 and stored != wanted and not _is_finite(converted):
                raise ModelFolderError(
                    f"{entry.file.parent}: {entry.file.name} has numbers in {entry.name} that are too large for "
                    "float16. Set engine.dtype to bfloat16 or float32."
                )
        return result

    def _staging(self) -> torch.Tensor:
        """One for each thread: freed and made for each tensor, they would leave holes between the weights."""
        if not hasattr(self._local, "staging"):
            self._local.staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, device="cpu")
        staging: torch.Tensor = self._local.staging
        return staging

    def _fill(self, values: torch.Tensor, entry: TensorEntry, offset: int) -> None:
        """Fill `values` with the bytes of a tensor from `offset` on."""
        memory = values.view(torch.uint8).numpy().data
        done = 0
        while done < len(memory):
            if self._ended:
                raise ModelFolderError("loading ended")
            # Reads of some MiB, because a read can't be stopped.
            part = memory[done : done + STAGING_BYTES]
            try:
                count = os.preadv(self._files[entry.file], [part], entry.start + offset + done)
            except OSError as error:
                raise ModelFolderError(f"{entry.file} can't be read: {error.strerror}.") from error
            if count == 0:
                raise ModelFolderError(
                    f"{entry.file.parent}: {entry.file.name} is damaged: it was cut while it was read. Copy it there "
                    "again."
                )
            done += count
            self._report(count)

    def _report(self, count: int) -> None:
        with self._lock:
            self._read_bytes += count
            now = self._clock()
            if now - self._reported >= PROGRESS_SECONDS and self._read_bytes < self._total:
                self._reported = now
                self._on_progress(self._read_bytes, self._total)


def _refuse_what_is_not_finite(entry: TensorEntry, values: torch.Tensor) -> None:
    if not _is_finite(values):
        raise ModelFolderError(
            f"{entry.file.parent}: {entry.file.name} has numbers in {entry.name} that are infinite or not numbers: no "
            "answer of this model would be right. Copy the model there again, or train it again."
        )


def _is_finite(values: torch.Tensor) -> bool:
    """A sum is fast, and finite only if all numbers are; each is looked at if it is not."""
    if not values.is_floating_point():
        return True
    wide = torch.float32 if values.itemsize < torch.float32.itemsize else values.dtype
    parts = values.split(CHECKED_NUMBERS)
    return all(bool(part.sum(dtype=wide).isfinite()) or bool(part.isfinite().all()) for part in parts)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that goes back to the operating system as soon as the tensor is gone: transformers stacks the experts of a
    layer, and then frees them. `malloc` would keep their memory and use it for nothing, because nearly all tensors are
    read before the first ones are freed, and stacks are larger than what each expert leaves."""
    count = math.prod(shape)
    if device.type != "cpu" or count * dtype.itemsize < MAPPED_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
