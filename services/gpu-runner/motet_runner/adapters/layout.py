"""Where everything of a checked adapter lies in its file: all that the engine needs to copy it. Holds no tensor.

It is made where adapters are checked and travels to the engine, which opens the file and copies: an iteration parses
nothing that a tenant has written.
"""

import os
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Matrix(NamedTuple):
    """One half of a LoRA, in the file's own order of rows."""

    start: int
    """Of its bytes in the file."""
    shape: tuple[int, int]
    dtype: str
    bytes: int


class LoraLinear(NamedTuple):
    """The LoRA of one linear of the base."""

    module: str
    a: Matrix
    b: Matrix
    scale: float


class FileStamp(NamedTuple):
    """What a file looks like from outside: other than at the check, its bytes are not those that were checked."""

    size: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, file: int | Path) -> "FileStamp":
        """Raises OSError for a path that is not there."""
        status = os.stat(file)  # noqa: PTH116 - of a descriptor too
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Travels with every request whose adapter is not on the device yet: so its linears stay packed until they are
    copied, and their bytes are counted once."""

    file: Path
    stamp: FileStamp
    rank: int
    """The largest."""
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
        return pickle.loads(self.packed)  # type: ignore[no-any-return]  # noqa: S301 - packed above, by ourselves

    def file_unchanged(self) -> bool:
        """Whether the file is still the one that was checked."""
        try:
            return FileStamp.of(self.file) == self.stamp
        except OSError:
            return False
