"""Compiles Triton kernels for a GPU that is not there: what its compiler accepts, and what a program takes of it."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)

SPILLED_BYTES = 8 if triton.__version__.startswith("3.6.") else 0
"""Of a thread, at most. The oldest Triton that the product accepts keeps a number of add_norm there, once."""


@dataclass(frozen=True)
class Compiled:
    name: str
    key: str
    """Of what was compiled: the same arguments, but for those that a kernel is not compiled anew for, give the same"""
    warps: int
    registers: int
    """Of a thread; a multiprocessor has 65,536"""
    spilled_bytes: int
    """Of a thread, which lie in slow memory because there are no registers left"""
    shared_bytes: int
    instructions: str


_READ: dict[str, Compiled] = {}
"""By key: to read a kernel takes longer than to find that it is compiled."""


class _AbsentCard:
    """What Triton asks of the driver until it launches"""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER


@contextmanager
def launches_are_compiled() -> Iterator[list[Compiled]]:
    """What is launched meanwhile, with tensors on the CPU, is compiled for HOPPER and does not run."""
    found: list[Compiled] = []
    run, active = JITFunction.run, driver._active  # noqa: SLF001

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        if kernel.hash not in _READ:
            _READ[kernel.hash] = _read(self.__name__, kernel)
        found.append(_READ[kernel.hash])
        return kernel

    driver.set_active(_AbsentCard())
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run
        driver._active = active  # noqa: SLF001


def _read(name: str, kernel: Any) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage, instructions = (_cuobjdump(option, cubin) for option in ("-res-usage", "-sass"))
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    metadata = kernel.metadata
    return Compiled(name, kernel.hash, metadata.num_warps, int(registers), int(stack), metadata.shared, instructions)


def _cuobjdump(option: str, cubin: Path) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, option, cubin], capture_output=True, text=True, check=True).stdout
