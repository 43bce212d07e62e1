"""`python -m tools.sanitize.under MODULE ARGUMENT…` runs a module of Python on the kernels with sanitizers.

They are told what each tensor is whose address somebody asks for: of which type its numbers are, and where they end.
MOTET_INSTRUCTIONS names the only set of instructions that is tested; empty: all that this CPU has.
"""

import ctypes
import os
import runpy
import sys
from functools import wraps
from typing import Any

import torch

from motet_kernels.cpp import compiler
from testbed.compiled_kernels import compiled_library

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int64: 3, torch.int32: 4}
"""As `source/walk.h` calls them; any other type is bytes in which anything may lie."""
ANY = -1


def tell(note: Any) -> None:
    data_ptr = torch.Tensor.data_ptr

    @wraps(data_ptr)
    def noted(tensor: torch.Tensor) -> int:
        address = data_ptr(tensor)
        if tensor.numel() and tensor.device.type == "cpu":
            reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            note(address, reach * tensor.itemsize, TYPES.get(tensor.dtype, ANY))
        return address

    torch.Tensor.data_ptr = noted  # type: ignore[method-assign, assignment]


def main(module: str) -> None:
    if only := os.environ.get("MOTET_INSTRUCTIONS"):
        compiler.INSTRUCTION_SETS = tuple(one for one in compiler.INSTRUCTION_SETS if one.name == only)
    note = compiled_library().loaded.motet_note  # the ordinary library has none
    note.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    note.restype = None
    tell(note)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    del sys.argv[0]
    main(sys.argv[0])
