"""The layout of a checked adapter: where each matrix is in the file. The engine needs only this to copy the adapter.

The service makes the layout when it checks an adapter, and sends it to the engine. The engine opens the file and copies
bytes, so it parses nothing that a tenant has written.
"""

import os
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file, in the file's own order of rows."""

    start: int
    """Where the tensor's bytes begin in the file."""
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class LoraLinear(NamedTuple):
    """The LoRA of one linear of the base model."""

    module: str
    a: StoredTensor
    b: StoredTensor
    scale: float


class FileStamp(NamedTuple):
    """Size, time and inode of a file. If they have changed since the check, the bytes may have changed."""

    size: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, file: int | Path) -> "FileStamp":
        """Raises OSError if the path does not exist."""
        status = os.stat(file)  # noqa: PTH116 - takes a descriptor, too
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """The layout is sent to the engine with every request whose adapter is not on the device yet. So the linears are
    pickled only once, and stay pickled until the adapter is loaded; their bytes are added only once."""

    file: Path
    stamp: FileStamp
    rank: int
    """The largest rank of the linears."""
    size: int
    """Bytes of all matrices."""
    packed: bytes = field(repr=False)

    @classmethod
    def of(cls, file: Path, stamp: FileStamp, rank: int, linears: Iterable[LoraLinear]) -> "AdapterLayout":
        linears = tuple(linears)
        size = sum(linear.a.bytes + linear.b.bytes for linear in linears)
        return cls(file, stamp, rank, size, pickle.dumps(linears, protocol=5))

    @property
    def linears(self) -> tuple[LoraLinear, ...]:
        return pickle.loads(self.packed)  # type: ignore[no-any-return]  # noqa: S301 - pickled above

    def file_unchanged(self) -> bool:
        """True if the file is still the one that was checked."""
        try:
            return FileStamp.of(self.file) == self.stamp
        except OSError:
            return False
