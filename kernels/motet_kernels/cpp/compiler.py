"""Finds this machine's compiler and its CPU's instruction sets."""

import errno
import os
import platform
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from motet_kernels.cpp.programs import run

NAMES = ("c++", "g++", "clang++")

OPTIONS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread")

COMPILE_SECONDS = 300.0
"""A compiler that takes longer is killed. Usually, compiling takes a few seconds."""

SHORTAGES = tuple(os.strerror(number) for number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE))
"""The messages of temporary shortages: memory, processes, open files"""
_PUT_OFF = re.compile(
    rf"\b(Killed|Terminated|Hangup|Interrupt)\b|{'|'.join((*SHORTAGES, os.strerror(errno.ENOSPC)))}"
    r"|out of memory|memory exhausted|bad_alloc|CPU time limit exceeded"
)
"""This output of a compiler means that the compiler or its child was killed from outside, or had no room."""
CRASHES = frozenset({signal.SIGILL, signal.SIGSEGV, signal.SIGTRAP, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT})
"""The signals of wrong code. Other signals come from outside."""


class CompilerError(Exception):
    """The compiler is missing, or cannot compile. The message is one line."""


class NotNow(Exception):
    """The machine lacked room or time to compile or test, or this process failed. The compiler and the library may be
    right. The message is one line."""


@dataclass(frozen=True)
class InstructionSet:
    name: str
    cpu_flags: frozenset[str]
    """The CPU flags that the set needs, by Linux' names"""
    options: tuple[str, ...]


def _x86(name: str, *flags: str) -> InstructionSet:
    options = (flag.replace("amx_", "amx-").replace("_bf16", "bf16") for flag in flags)
    return InstructionSet(name, frozenset(flags), tuple(f"-m{option}" for option in options))


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
INSTRUCTION_SETS: tuple[InstructionSet, ...] = (
    _x86("amx-bf16", *_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
    _x86("avx512-bf16", *_AVX512, "avx512_bf16"),
    _x86("avx512", *_AVX512),
    _x86("avx2", *_AVX2),
    InstructionSet("basic", frozenset(), ()),
)
"""The fastest first. Every CPU of an architecture has the last set, which on 64-bit Arm means NEON."""


def find_compiler(wanted: str = "") -> Path:
    """The compiler of this name or path, or the first usual one on the PATH."""
    for name in [wanted] if wanted else NAMES:
        if found := shutil.which(name):
            return Path(found)
    raise CompilerError(f"there is no compiler {wanted}" if wanted else f"there is no compiler ({', '.join(NAMES)})")


def version_of(compiler: Path) -> str:
    return _run([str(compiler), "--version"], seconds=30.0)


def instruction_sets(cpu_flags: frozenset[str] | None, machine: str = "") -> list[InstructionSet]:
    """The sets of a CPU with these flags; None: all sets of an architecture. `machine`: Linux' name of the
    architecture; empty: this machine's."""
    if cpu_flags is None:
        cpu_flags = frozenset().union(*(one.cpu_flags for one in INSTRUCTION_SETS)) if _on_x86(machine) else frozenset()
    return [one for one in INSTRUCTION_SETS if one.cpu_flags <= cpu_flags]


def _on_x86(machine: str = "") -> bool:
    return (machine or platform.machine()) in {"x86_64", "AMD64"}


def cpu_flags() -> frozenset[str]:
    """The CPU flags that Linux reports as usable. Empty if it reports none, or on other architectures."""
    if not _on_x86():
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def compile_library(compiler: Path, sources: Sequence[Path], options: Sequence[str], library: Path) -> None:
    """Raises CompilerError and NotNow."""
    _run([str(compiler), *OPTIONS, *options, *map(str, sources), "-o", str(library)], seconds=COMPILE_SECONDS)


def _run(command: list[str], *, seconds: float) -> str:
    """Raises CompilerError and NotNow."""
    name = command[0]
    try:
        ran = run(command, seconds=seconds)
    except subprocess.TimeoutExpired as error:
        raise NotNow(f"{name} took more than {seconds:.0f} s") from error
    except OSError as error:
        raise NotNow(f"{name} could not run: {error.strerror or error}") from error
    if not ran.returncode:
        return ran.stdout
    if (ran.returncode < 0 and -ran.returncode not in CRASHES) or _PUT_OFF.search(ran.stderr):
        said = next((line.strip() for line in ran.stderr.splitlines() if _PUT_OFF.search(line)), "")
        raise NotNow(f"{name} was ended: {said or f'status {ran.returncode}'}")
    raise CompilerError(f"{name} failed: {first_error(ran.stderr) or f'status {ran.returncode}'}")


def first_error(output: str) -> str:
    """The first line with "error" of a compiler's or a program's output, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
