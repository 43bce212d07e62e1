"""Reads the weights of a checkpoint for transformers.

`CheckpointReader` lends transformers a state dict of tensors that are still on disk. Transformers renames, merges and
ties these tensors as `from_pretrained` always does, and reads each tensor once, in its threads: our `StoredTensor`
reads by `preadv`, directly into memory of the model's type and device.

Transformers' own reader maps the files. The mapped weights stay in the page cache, and if a file is truncated later,
the process is killed. To change the type, such as from bfloat16 to float32, that reader holds both copies.
"""

import math
import mmap
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any, Self

import torch

from motet.errors import ModelFileDamaged, ModelFolderError
from motet_runner.execute.load.checkpoint_headers import DTYPES, Checkpoint, TensorEntry, quantised
from motet_runner.interface import LoadProgress

STAGING_BYTES = 8 << 20
"""The bytes that a thread reads at once if they are converted or sent to another device"""

CHECKED_NUMBERS = 1 << 17
"""The weights that are checked at once. Torch copies bfloat16 numbers to float32 to sum them; this bounds the copy."""

PROGRESS_SECONDS = 1.0

MAPPED_BYTES = 128 << 10
"""On a CPU, tensors of at least this size get their own memory mapping."""


def ignore_progress(read_bytes: int, total: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a state dict that is still on disk. Transformers reads it like a slice of safetensors: by
    `stored[...]` and `.to(device, dtype)`, in one of its threads."""

    entry: TensorEntry
    reader: "CheckpointReader" = field(repr=False)

    def __getitem__(self, everything: EllipsisType) -> Self:
        assert everything is ...
        return self

    def to(self, *, device: object, dtype: torch.dtype | None) -> torch.Tensor:  # noqa: ARG002 - transformers gives it
        """The tensor in `dtype`. The device is the reader's: without accelerate, transformers always gives the CPU as
        `device`."""
        return self.reader.read(self.entry, dtype)


class CheckpointReader:
    """Open files. When the block ends, no thread reads any more, and the files are closed."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, on_progress: LoadProgress) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._on_progress = on_progress
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._local = threading.local()
        self._read_bytes = 0
        self._total = checkpoint.bytes
        self._reported = time.monotonic()
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
            thread.join()  # transformers has told its threads to end, but does not wait for them
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
            raise quantised(entry)
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
        """One buffer per thread: a buffer per tensor would fragment the memory between the weights."""
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
            # Small reads (some MiB), because a read can't be stopped.
            part = memory[done : done + STAGING_BYTES]
            try:
                count = os.preadv(self._files[entry.file], [part], entry.start + offset + done)
            except OSError as error:
                raise ModelFolderError(f"{entry.file} can't be read: {error.strerror}.") from error
            if count == 0:
                raise ModelFileDamaged(
                    f"{entry.file.parent}: {entry.file.name} is damaged: it was cut while it was read. Copy it there "
                    "again."
                )
            done += count
            self._report(count)

    def _report(self, count: int) -> None:
        with self._lock:
            self._read_bytes += count
            now = time.monotonic()
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
    """A sum is fast, and finite only if all numbers are; if it is not finite, each number is checked."""
    if not values.is_floating_point():
        return True
    wide = torch.float32 if values.itemsize < torch.float32.itemsize else values.dtype
    parts = values.split(CHECKED_NUMBERS)
    return all(bool(part.sum(dtype=wide).isfinite()) or bool(part.isfinite().all()) for part in parts)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that the operating system gets back when the tensor is freed: transformers stacks the experts of a layer,
    and then frees the experts. `malloc` would keep their memory unused: nearly all tensors are read before the first
    experts are freed, and a stack does not fit where one expert was."""
    count = math.prod(shape)
    if device.type != "cpu" or count * dtype.itemsize < MAPPED_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
