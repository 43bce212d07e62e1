"""The compiled library, called by ctypes with numbers and addresses.

A failed call raises MemoryError, if memory does not suffice, or RuntimeError.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from motet_kernels.cpp.amx_permission import tiles_allowed

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element type → its number in the library"""

_NUMBER, _ADDRESS, _REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float

_OUT_OF_MEMORY, _FAILED = -1, -2
"""The results of failed calls, see `source/border.h`"""


class Library:
    """Raises OSError or AttributeError if the file is not such a library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.loaded = ctypes.CDLL(str(path))
        tiles_allowed()  # each process has to ask Linux; `usable_sets` has checked the answer
        self.lanes: int = self._function("motet_lanes", result=_NUMBER)()
        self._failure = self._function("motet_failure", result=ctypes.c_char_p)
        self.add_lora = self._computing(
            "motet_add_lora",
            *(_NUMBER, _ADDRESS, _NUMBER, _ADDRESS, _NUMBER, _NUMBER, _NUMBER, _NUMBER),
            *(_ADDRESS, _NUMBER, _ADDRESS, _NUMBER),
        )
        self.packed_size = self._function("motet_packed_size", _NUMBER, _NUMBER, result=_NUMBER)
        self.packed_width = self._function("motet_packed_width", _NUMBER, result=_NUMBER)
        self.pack = self._computing("motet_pack", _NUMBER, _ADDRESS, _NUMBER, _NUMBER, _NUMBER, _ADDRESS, _NUMBER)
        self.unpack = self._function("motet_unpack", _NUMBER, _ADDRESS, _NUMBER, _ADDRESS, _NUMBER, _ADDRESS)
        self.linear = self._computing(
            "motet_linear",
            *(_NUMBER, _ADDRESS, _NUMBER, _NUMBER, _NUMBER, _ADDRESS, _ADDRESS, _ADDRESS, _NUMBER, _NUMBER, _NUMBER),
        )
        self.attention = self._computing(
            "motet_attention",
            *(_NUMBER, _ADDRESS, _NUMBER, _NUMBER, _ADDRESS, _ADDRESS, _ADDRESS),
            *[_NUMBER] * 6,
            *(_ADDRESS, _REAL, _NUMBER, _REAL),
        )
        self.program_pass = self._computing("motet_program_pass", _ADDRESS, _ADDRESS)
        self.largest = self._function("motet_largest", _NUMBER, _ADDRESS, _NUMBER, _NUMBER, _ADDRESS)
        self.read_file = self._computing(
            "motet_read_file", _NUMBER, _NUMBER, _ADDRESS, _NUMBER, _NUMBER, _NUMBER, _ADDRESS
        )
        self.read = self._function("motet_read", _ADDRESS, _NUMBER, result=ctypes.c_uint64)

    def _computing(self, name: str, *arguments: Any) -> Callable[..., int]:
        """A function that may fail: it allocates memory, or uses several threads."""
        function = self._function(name, *arguments, result=_NUMBER)
        function.errcheck = self._answer  # type: ignore[attr-defined] # ctypes' own
        return function

    def _answer(self, result: int, _function: Any, _arguments: Any) -> int:
        if result == _OUT_OF_MEMORY:
            raise MemoryError("the compiled kernels got no more memory")
        if result == _FAILED:
            raise RuntimeError(f"the compiled kernels failed: {self._failure().decode(errors='replace')}")
        return result

    def _function(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
        function = getattr(self.loaded, name)
        function.argtypes = arguments
        function.restype = result
        return function  # type: ignore[no-any-return] # ctypes has no types of its own for functions
