"""Reads a part of a file into memory on several threads, without Python's lock."""

import ctypes
import os

import numpy as np
import numpy.typing as npt
import torch

from motet_kernels.cpp.library import Library


def read_file(library: Library, file: int, at: int, into: npt.NDArray[np.uint8], flags: int) -> int:
    """Fills `into` from this place of the file on, with the flags of os.preadv. → the sum of its 8-byte words and of
    the bytes after the last one, modulo 2^64. Raises OSError, also where the file ends before."""
    found = ctypes.c_uint64()
    place, threads = into.ctypes.data, torch.get_num_threads()
    if error := library.read_file(file, at, place, len(into), flags, threads, ctypes.addressof(found)):
        raise OSError(error, os.strerror(error))
    return found.value
