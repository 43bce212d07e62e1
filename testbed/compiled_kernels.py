"""The compiled kernels, for tests: built once on this machine, as for a user."""

from functools import cache
from pathlib import Path

from motet_kernels.cpp import Library, build
from motet_kernels.cpp.builder import Built
from motet_kernels.cpp.compiler import CompilerError, find_compiler
from motet_runner.settings import KERNEL_CACHE
from testbed.machine import lacking

CACHE = KERNEL_CACHE.expanduser()


def needs_a_compiler() -> Path:
    try:
        return find_compiler()
    except CompilerError as error:
        lacking(str(error))


@cache
def built() -> Built:
    return build(CACHE)


def compiled_library() -> Library:
    needs_a_compiler()
    return built().library
