"""Reads the matrices of a checked adapter as tensors, from the places in its layout."""

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from motet.errors import AdapterFetchFailed
from motet_runner.adapters.layout import AdapterLayout, FileStamp, StoredTensor

TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

MAX_BYTES_AT_ONCE = 4 << 20
"""A file that is not larger is read as a whole. Each read gives Python's lock to another thread, and to get it back
takes as long as to read a small matrix."""

MAX_BYTES_A_READ = 256 << 10
"""After each, the engine sees that the disk answers, however slow it is."""

Values = npt.NDArray[np.uint8]


class WeightReader:
    """A context manager that holds the file open. Raises AdapterFetchFailed if the file isn't the one that was checked.

    The end of the context checks the file again, because iterations run between two reads. The file is not mapped: if a
    mapped file became shorter, the process would be killed.
    """

    def __init__(self, layout: AdapterLayout) -> None:
        self._layout = layout
        self._whole: Values | None = None
        self.given = 0
        """How many bytes the disk has given"""

    def __enter__(self) -> "WeightReader":
        try:
            self._file = os.open(self._layout.file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise has_changed(self._layout) from None
        if FileStamp.of(self._file) != self._layout.stamp:
            os.close(self._file)
            raise has_changed(self._layout)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None and FileStamp.of(self._file) != self._layout.stamp:
                raise has_changed(self._layout)
        finally:
            os.close(self._file)

    def read(self, matrix: StoredTensor) -> torch.Tensor:
        return self.read_alike([matrix])[0]

    def read_alike(self, matrices: Sequence[StoredTensor]) -> torch.Tensor:
        """Matrices of one shape and type, with one dimension more for their number"""
        first = matrices[0]
        values = np.empty(len(matrices) * first.bytes, np.uint8)
        for matrix, into in zip(matrices, values.reshape(len(matrices), -1), strict=True):
            self.read_into(into, matrix)
        return torch.frombuffer(values, dtype=TYPES[first.dtype]).view(len(matrices), *first.shape)

    def read_into(self, into: Values, matrix: StoredTensor) -> None:
        if self._layout.stamp.size > MAX_BYTES_AT_ONCE:
            self._fill(into, matrix.start)
            return
        if self._whole is None:
            whole = np.empty(self._layout.stamp.size, np.uint8)
            self._fill(whole, 0)
            self._whole = whole
        into[:] = self._whole[matrix.start : matrix.start + matrix.bytes]

    def _fill(self, into: Values, at: int) -> None:
        left = into.data
        while left:
            count = self._read_some(left[:MAX_BYTES_A_READ], at)
            if not count:
                raise has_changed(self._layout)
            at, left = at + count, left[count:]
            self.given += count

    def _read_some(self, into: memoryview, at: int) -> int:
        return os.preadv(self._file, [into], at)


def has_changed(layout: AdapterLayout) -> AdapterFetchFailed:
    return AdapterFetchFailed(
        f"{layout.file} has changed since it was checked, so it is not loaded. Motet fetches and checks it again "
        "automatically.",
        retry_after=1.0,
    )
