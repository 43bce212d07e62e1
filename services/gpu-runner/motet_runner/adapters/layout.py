"""The layout of a checked adapter: where each matrix is in the file. The engine needs only this to copy the adapter.

The check of an adapter makes the layout, and the engine gets it. The engine opens the file and copies bytes, so it
parses nothing that a tenant has written.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import orjson

SCALE_ROWS = 2
"""As `motet_kernels.run_layout` says: this module needs no torch"""

SLAB_VERSION = 2
"""Of what is in a slab. An earlier version that shares the cache has files of other names."""

WITH_VLLM = "with vLLM"
"""Where adapters that scale and shift are not served yet"""

MAX_UNPACKED = 16
"""Linears that are kept: those of most adapters are alike, and each is read for its load and for its proof."""

_NAME = re.compile(r"layout-[0-9a-f]{32}\.json")


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file, in the file's own order of rows."""

    start: int
    """Where the tensor's bytes begin in the file."""
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class LoraLinear(NamedTuple):
    """What an adapter changes in one linear of the base model."""

    module: str
    a: StoredTensor | None
    b: StoredTensor | None
    """A and B are None if only the linear's bias was trained."""
    scale: float
    magnitude: StoredTensor | None = None
    """Of DoRA: the lengths of the rows of the changed weight"""
    lora_bias: StoredTensor | None = None
    """The bias of lora_B"""
    bias: StoredTensor | None = None
    """It takes the place of the linear's own bias."""

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        every = (self.a, self.b, self.magnitude, self.lora_bias, self.bias)
        return tuple(one for one in every if one is not None)

    @property
    def scales(self) -> bool:
        """True if the linear's own result is scaled or shifted"""
        return self.magnitude is not None or self.lora_bias is not None or self.bias is not None


class FileStamp(NamedTuple):
    """Size, time and inode of a file. If they have changed since the check, the bytes may have changed."""

    size: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, file: int | Path) -> "FileStamp":
        """Raises OSError if the path does not exist."""
        return cls.of_status(os.stat(file))  # noqa: PTH116 - takes a descriptor, too

    @classmethod
    def of_status(cls, status: os.stat_result) -> "FileStamp":
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """The linears are in a file beside the adapter's, and are read when the adapter is loaded: thousands of adapters
    wait, and the layout is sent to the engine with every request whose adapter is not on the device yet."""

    path: str
    """Of the weights. A Path would take three times the memory."""
    stamp: FileStamp
    rank: int
    """The rank that the adapter takes on the device: the largest of the linears and, if it scales, SCALE_ROWS more."""
    size: int
    """Bytes of all matrices."""
    linears_file: str
    """The name says what is in the file, so no other check writes something else there."""
    packed: bytes = field(default=b"", repr=False)
    """The linears, while they are not in their file."""
    slab: str = ""
    """The name of the adapter's slab, beside its file, if it may have one: see `motet_runner.adapters.slab`."""

    @classmethod
    def of(cls, file: Path, stamp: FileStamp, rank: int, linears: Iterable[LoraLinear]) -> "AdapterLayout":
        linears = tuple(linears)
        size = sum(tensor.bytes for linear in linears for tensor in linear.tensors)
        packed = json.dumps(linears, separators=(",", ":")).encode()
        return cls(str(file), stamp, rank, size, _name_of(packed), packed)

    @property
    def file(self) -> Path:
        return Path(self.path)

    @property
    def linears(self) -> tuple[LoraLinear, ...]:
        """Raises OSError if their file can't be read, and ValueError if it holds something else."""
        return unpacked(self.packed or self._stored())

    def stored(self) -> "AdapterLayout":
        """The same, without what is in the file now."""
        return replace(self, packed=b"")

    def with_slab(self, *depends_on: object) -> "AdapterLayout":
        """The same, with the name of the slab that depends on this and on the layout."""
        text = repr((SLAB_VERSION, depends_on, self.stamp, self.rank, self.linears_file))
        return replace(self, slab=f"slab-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.bin")

    def is_stored(self) -> bool:
        try:
            return bool(self._stored())
        except (OSError, ValueError):
            return False

    def _stored(self) -> bytes:
        packed = self.file.with_name(self.linears_file).read_bytes()
        if _name_of(packed) != self.linears_file:
            raise ValueError(f"{self.linears_file} has changed since it was written")
        return packed

    def file_unchanged(self) -> bool:
        """True if the file is still the one that was checked."""
        try:
            return FileStamp.of(self.file) == self.stamp
        except OSError:
            return False


def checked_name(name: str, packed: bytes) -> str:
    """The name of a layout's file, which the service writes or reads, although a process that parses a tenant's files
    may have made it up. `packed`: what is to be in the file, if it is known. Raises ValueError."""
    if not _NAME.fullmatch(name) or (packed and name != _name_of(packed)):
        raise ValueError(f"{name!r} is not the name of the layout's file")
    return name


def slab_key(name: str) -> bytes:
    """What is in a slab's name. `name` is from `with_slab`."""
    return bytes.fromhex(name.removeprefix("slab-").removesuffix(".bin"))


def _name_of(packed: bytes) -> str:
    return f"layout-{hashlib.blake2b(packed, digest_size=16).hexdigest()}.json"


@lru_cache(MAX_UNPACKED)
def unpacked(packed: bytes) -> tuple[LoraLinear, ...]:
    return tuple(
        LoraLinear(module, _tensor(a), _tensor(b), float(scale), *map(_tensor, others))
        for module, a, b, scale, *others in orjson.loads(packed)
    )


def _tensor(packed: list[Any] | None) -> StoredTensor | None:
    if packed is None:
        return None
    start, shape, dtype, size = packed
    return StoredTensor(start, tuple(shape), dtype, size)
