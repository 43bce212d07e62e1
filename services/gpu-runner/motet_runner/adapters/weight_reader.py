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

Values = npt.NDArray[np.uint8]


class WeightReader:
    """A context manager that holds the file open. Raises AdapterFetchFailed if the file isn't the one that was checked.

    The end of the context checks the file again, because iterations run between two reads. The file is not mapped: if a
    mapped file became shorter, the process would be killed.
    """

    def __init__(self, layout: AdapterLayout) -> None:
        self._layout = layout
        self._whole: Values | None = None

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
        values = np.concatenate([self.values_of(matrix) for matrix in matrices])
        return torch.frombuffer(values, dtype=TYPES[first.dtype]).view(len(matrices), *first.shape)

    def values_of(self, matrix: StoredTensor) -> Values:
        """Its bytes. They may be the reader's own: do not write to them."""
        if self._layout.stamp.size > MAX_BYTES_AT_ONCE:
            return self._read(matrix.start, matrix.bytes)
        if self._whole is None:
            self._whole = self._read(0, self._layout.stamp.size)
        return self._whole[matrix.start : matrix.start + matrix.bytes]

    def _read(self, at: int, size: int) -> Values:
        values = np.empty(size, np.uint8)
        left = values.data
        while left:
            count = os.preadv(self._file, [left], at)
            if not count:
                raise has_changed(self._layout)
            at, left = at + count, left[count:]
        return values


def has_changed(layout: AdapterLayout) -> AdapterFetchFailed:
    return AdapterFetchFailed(
        f"{layout.file} has changed since it was checked, so it is not loaded. Motet fetches and checks it again "
        "automatically.",
        retry_after=1.0,
    )
