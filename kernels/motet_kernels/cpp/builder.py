"""A library of the sources, for this compiler and this CPU: the one in the cache, or a new one.

A new library is tested in a process of its own, because one with instructions that the CPU lacks would end this one.
Only then it gets its name in the cache, at once: processes that build at the same time do not disturb each other.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from motet_kernels.cpp.compiler import (
    OPTIONS,
    CompilerError,
    InstructionSet,
    compile_library,
    cpu_flags,
    find_compiler,
    first_error,
    instruction_sets,
    version_of,
)
from motet_kernels.cpp.library import Library
from motet_kernels.cpp.self_test import SelfTestFailed, check

SOURCE = Path(__file__).parent / "source"

TEST_SECONDS = 120.0

ABANDONED_SECONDS = 3600.0
"""A folder of a build that is older than this belongs to a process that was killed."""


class CannotBuild(Exception):
    """There are no compiled kernels. The message is one line that says why."""


@dataclass(frozen=True, slots=True)
class Built:
    library: Library
    instructions: str
    """The name of the instruction set"""
    seconds: float
    """What the build took; 0 if the library was in the cache"""


def build(cache: Path, compiler: str = "") -> Built:
    """The library of this machine. `compiler` is a name or a path; empty: the first one on the path that is usual."""
    try:
        program = find_compiler(compiler)
        identity = f"{program.resolve()}\n{version_of(program)}"
        _prepare(cache)
        reasons = []
        for instructions in instruction_sets(cpu_flags()):
            try:
                return _build(cache, program, identity, instructions)
            except (CompilerError, SelfTestFailed) as error:  # perhaps the compiler is too old for these instructions
                reasons.append(f"{instructions.name}: {error}")
    except CompilerError as error:
        raise CannotBuild(str(error)) from error
    except OSError as error:
        raise CannotBuild(f"the folder {cache} cannot be used: {error.strerror or error}") from error
    raise CannotBuild("; ".join(reasons))


def _build(cache: Path, compiler: Path, identity: str, instructions: InstructionSet) -> Built:
    path = cache / f"{instructions.name}-{_key(identity, instructions)}.so"
    if path.is_file():
        try:
            return Built(_checked(path), instructions.name, 0.0)
        except SelfTestFailed:
            path.unlink(missing_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as folder:
        unproved = Path(folder) / path.name
        compile_library(compiler, sorted(SOURCE.glob("*.cpp")), instructions.options, unproved)
        _test_in_a_process(unproved)
        unproved.replace(path)
    return Built(_checked(path), instructions.name, time.monotonic() - began)


def _checked(path: Path) -> Library:
    try:
        library = Library(path)
    except (OSError, AttributeError) as error:
        raise SelfTestFailed(str(error)) from error
    check(library)
    return library


def _key(identity: str, instructions: InstructionSet) -> str:
    digest = hashlib.sha256()
    for part in (identity, *OPTIONS, *instructions.options):
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def _prepare(cache: Path) -> None:
    """Whoever may write into the folder may run code in this process."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = cache.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise CannotBuild(
            f"the folder {cache} must belong to the user of this process, and nobody else may write to it"
        )
    for folder in cache.glob("build-*"):
        if time.time() - folder.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _test_in_a_process(library: Path) -> None:
    command = [sys.executable, "-P", "-m", "motet_kernels.cpp", str(library)]
    try:
        ran = subprocess.run(
            command, capture_output=True, check=False, text=True, timeout=TEST_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise SelfTestFailed(f"its test took more than {TEST_SECONDS:.0f} s") from error
    if ran.returncode:
        raise SelfTestFailed(first_error(ran.stderr) or f"its test ended with status {ran.returncode}")
