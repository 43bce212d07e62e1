"""Kernels for a CPU in C++: compiled once on the machine that uses them, and kept.

`source/` has a plain C interface and needs no headers but the compiler's. `compiler.py` finds a compiler and what the
CPU can do, `builder.py` makes a library of both or takes one that was made before, `library.py` calls it by ctypes, and
`self_test.py` refuses it when its results are wrong. `lora_backend.py` is a back end of add_lora,
`attention.py` is attention over pages. `linear.py` packs the weights of a model's own linears and multiplies with them.
`steps.py` is what a recorded forward pass consists of, `peepholes/` brings some of its steps together, and `program.py`
makes one call of them. `amx_permission.py` asks Linux for the CPU's tiles (AMX).
"""

from motet_kernels.cpp.attention import AttentionBatch, PagedAttention
from motet_kernels.cpp.builder import Built, CannotBuild, build
from motet_kernels.cpp.library import Library
from motet_kernels.cpp.lora_backend import CppBackend

__all__ = ["AttentionBatch", "Built", "CannotBuild", "CppBackend", "Library", "PagedAttention", "build"]
