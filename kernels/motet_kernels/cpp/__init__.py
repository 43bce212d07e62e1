"""Kernels for a CPU in C++: compiled once on the machine that uses them, and kept.

`source/` has a plain C interface and needs only the compiler's headers. `compiler.py` finds a compiler and the CPU's
instruction sets, `builder.py` builds a library or takes one that was built before, `library.py` calls it by ctypes, and
`self_test.py` refuses it when its results are wrong. `lora_backend.py` is a back end of add_lora, `attention.py` is
attention over pages. `linear.py` packs the weights of a model's own linears and multiplies by them. `steps.py` defines
the steps of a recorded forward pass, `peepholes/` fuses some steps, and `program.py` runs all steps in one call.
`read_file.py` reads adapters. `amx_permission.py` asks Linux for the CPU's tiles (AMX).
"""

from motet_kernels.cpp.attention import AttentionBatch, PagedAttention
from motet_kernels.cpp.builder import Built, CannotBuild, build
from motet_kernels.cpp.library import Library
from motet_kernels.cpp.lora_backend import CppBackend
from motet_kernels.cpp.read_file import read_file

__all__ = ["AttentionBatch", "Built", "CannotBuild", "CppBackend", "Library", "PagedAttention", "build", "read_file"]
