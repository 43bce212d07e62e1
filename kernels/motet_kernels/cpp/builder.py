"""Finds or builds the library for this compiler and this CPU: one that came with the installation, one from the cache,
or a new one.

A new library is first tested in another process: instructions that the CPU lacks, or a damaged file, would crash this
process. Only then the library gets its name in the cache, atomically. Later starts test it only in their own process,
unless something has changed. The name contains the file's digest: a file with another digest is removed, and built
again. If several processes want the same library, one process builds it, and the others wait.

An image has no compiler. When an image is made, `install` puts a library for each instruction set beside the packages.
A wheel for one architecture has these libraries among its modules. They are tested on the machine that runs them.
"""

import errno
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from motet_kernels.cpp.amx_permission import tiles_allowed
from motet_kernels.cpp.compiler import (
    COMPILE_SECONDS,
    CRASHES,
    INSTRUCTION_SETS,
    OPTIONS,
    SHORTAGES,
    CompilerError,
    InstructionSet,
    NotNow,
    compile_library,
    cpu_flags,
    find_compiler,
    first_error,
    instruction_sets,
    version_of,
)
from motet_kernels.cpp.library import Library
from motet_kernels.cpp.passed_mark import PassedMark, mark_of
from motet_kernels.cpp.programs import run
from motet_kernels.cpp.self_test import SelfTestFailed, check

SOURCE = Path(__file__).parent / "source"

TEST_SECONDS = 120.0

WAIT_SECONDS = COMPILE_SECONDS + TEST_SECONDS
"""How long to wait while another process builds. After that time, this process builds, too."""
_LOOK_AGAIN_SECONDS = 0.1

ABANDONED_SECONDS = 3600.0
"""A build folder older than this belongs to a process that was killed."""

UNUSED_SECONDS = 30 * 24 * 3600.0
"""A library that no process has loaded for this time is removed: it belongs to another version, compiler or CPU."""

INSTALLED = Path(sys.prefix) / "motet-kernels"
"""The libraries of an image"""
PACKAGED = Path(__file__).parent / "libraries"
"""The libraries of a wheel"""

_NAME = re.compile(rf"({'|'.join(one.name for one in INSTRUCTION_SETS)})-[0-9a-f]{{24}}(-[0-9a-f]{{64}})?\.so")


_NOT_FOR_HERE = re.compile(
    "ELF|file too short|cannot read file data|version `[^']+' not found|undefined symbol"
    f"|cannot open shared object file: {os.strerror(errno.ENOENT)}"
)
"""Linux' messages about a library that is incomplete, or that links to what this system lacks. After other errors, the
file may be right."""
WRONG = 3
"""The test process's exit status for a wrong library"""
_CRASHED_FOR_LACK = ("bad_alloc", *SHORTAGES)
"""Messages of a program that crashes for lack of memory or threads. Other crashes mean wrong code."""


class CannotBuild(Exception):
    """Compiled kernels cannot be had. The message is one line that says why."""


@dataclass(frozen=True, slots=True)
class Built:
    library: Library
    instructions: str
    """The name of the instruction set"""
    seconds: float
    """How long the build took; 0 if the library existed"""
    damaged: str = ""
    """Why an existing library was built again"""
    skipped: str = ""
    """Why faster libraries are not used"""
    unmarked: str = ""
    """Why the library has no mark that it passed its test: the next start tests it in another process, too"""


def build(cache: Path, compiler: str = "", *, installed: Path | None = None) -> Built:
    """The library for this machine. `compiler`: a name or a path; empty: the first usual one on the PATH. `installed`:
    the folder of the installation's libraries; None: an image's, then a wheel's."""
    reasons: list[str] = []
    try:
        usable = usable_sets(reasons)
        for folder in [installed] if installed else [INSTALLED, PACKAGED]:
            if (found := _installed(folder, usable, reasons)) is not None:
                return replace(found, skipped="; ".join(reasons))
        program = find_compiler(compiler)
        identity = f"{program.resolve()}\n{version_of(program)}"
        _prepare(cache)
        with _alone(cache):
            for instructions in usable:
                try:
                    built = _build(cache, program, identity, instructions)
                    return replace(built, skipped="; ".join(reasons))
                except (CompilerError, SelfTestFailed) as error:  # the compiler may be too old for these instructions
                    reasons.append(f"{instructions.name}: {error}")
    except CompilerError as error:
        raise CannotBuild("; ".join([*reasons, str(error)])) from error
    except NotNow as error:  # an untested library is not replaced by a slower one
        raise CannotBuild("; ".join([*reasons, f"{error}. The next start tries again"])) from error
    except OSError as error:
        raise CannotBuild(f"{error.filename or cache} cannot be used: {error.strerror or error}") from error
    raise CannotBuild("; ".join(reasons))


def install(into: Path = INSTALLED, compiler: str = "", machine: str = "") -> list[Path]:
    """Make a library for each instruction set of an architecture, whether this CPU has it or not. `machine`: Linux'
    name of the target architecture; empty: this machine's. Raises CompilerError and NotNow."""
    program = find_compiler(compiler)
    into.mkdir(parents=True, exist_ok=True)
    made = []
    for instructions in instruction_sets(None, machine):
        made.append(into / file_name(instructions, machine=machine))
        compile_library(program, sorted(SOURCE.glob("*.cpp")), instructions.options, made[-1])
    return made


def usable_sets(reasons: list[str]) -> list[InstructionSet]:
    """The sets that the CPU has and Linux allows. `reasons` gets why a set of the CPU is not usable."""
    usable = []
    for instructions in instruction_sets(cpu_flags()):
        if "amx_tile" in instructions.cpu_flags and not tiles_allowed():
            reasons.append(f"{instructions.name}: Linux does not give this process the CPU's tiles (AMX)")
        else:
            usable.append(instructions)
    return usable


def _installed(folder: Path, usable: Sequence[InstructionSet], reasons: list[str]) -> Built | None:
    """The fastest library that passes its test on this CPU. `reasons` gets why faster ones are not usable."""
    if not any(folder.glob("*.so")):  # a removed wheel leaves its libraries' marks there
        return None
    strange = folder.stat().st_uid not in {0, os.geteuid()} or folder.stat().st_mode & 0o022
    if strange and folder != PACKAGED:  # who may write to PACKAGED may change this module, too
        reasons.append(f"the folder {folder} must belong to root or to the user of this process, and nobody else may "
                       "write to it")  # fmt: skip
        return None
    for instructions in usable:
        path = folder / file_name(instructions)
        if path.is_file():
            try:
                library, unmarked = _tested(path)
                return Built(library, instructions.name, 0.0, unmarked=unmarked)
            except SelfTestFailed as error:
                reasons.append(f"{path.name}: {error}")
        elif any((named := _NAME.fullmatch(one.name)) and named[1] == instructions.name for one in folder.iterdir()):
            reasons.append(f"{instructions.name}: the library in {folder} is of another version")
        else:
            reasons.append(f"{instructions.name}: {folder} has no library for these instructions")
    return None


def file_name(instructions: InstructionSet, identity: str = "", machine: str = "") -> str:
    digest = hashlib.sha256()
    for part in (machine or platform.machine(), identity, *OPTIONS, *instructions.options):
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{instructions.name}-{digest.hexdigest()[:24]}.so"


def _build(cache: Path, compiler: Path, identity: str, instructions: InstructionSet) -> Built:
    name = file_name(instructions, identity)
    damaged = ""
    for path in sorted(cache.glob(f"{name.removesuffix('.so')}-*.so")):
        try:
            _check_bytes(path, name)
            library, unmarked = _tested(path)
            with suppress(OSError):  # the folder may be read-only
                path.touch()  # marks it as in use
            _remove_unused(path)
            return Built(library, instructions.name, 0.0, damaged, unmarked=unmarked)
        except SelfTestFailed as error:
            damaged = f"{path.name}: {error}"
            path.unlink(missing_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as folder:
        unproved = Path(folder) / name
        compile_library(compiler, sorted(SOURCE.glob("*.cpp")), instructions.options, unproved)
        _test_in_a_process(unproved)
        _sync(unproved)
        path = unproved.replace(cache / with_digest(name, unproved))
    _sync(cache)
    _remove_unused(path)
    library, unmarked = _tested(path)
    return Built(library, instructions.name, time.monotonic() - began, damaged, unmarked=unmarked)


def _check_bytes(library: Path, name: str) -> None:
    try:
        same = library.name == with_digest(name, library)
    except OSError as error:
        raise _unreadable(library, error) from error
    if not same:
        raise SelfTestFailed("its bytes are not those that were written")


def with_digest(name: str, library: Path) -> str:
    return f"{name.removesuffix('.so')}-{_digest_of(library)}.so"


def _digest_of(library: Path) -> str:
    with library.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Makes the contents of the file or folder survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Waits until no other process builds in this folder, at most WAIT_SECONDS. The lock ends with the process."""
    descriptor = os.open(cache, os.O_RDONLY)
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOOK_AGAIN_SECONDS)
            except OSError:  # a file system without locks
                break
            else:
                break
        yield
    finally:
        os.close(descriptor)


def _tested(path: Path) -> tuple[Library, str]:
    """Tests a library in another process, unless the library is marked as passed; then tests it in this process. → the
    library, and why the next start finds no mark. Raises SelfTestFailed if the library is wrong, and NotNow."""
    mark = PassedMark(path)
    if not mark.take():
        _test_in_a_process(path)
    try:
        library = checked(path)
    except SelfTestFailed as error:
        if not path.exists():  # another process has removed it
            raise
        _test_in_a_process(path)  # the mark does not cover the libraries that this one links to
        raise NotNow(f"{path.name} failed its test in this process, and passed it in another: {error}") from error
    return library, mark.put()


def checked(path: Path) -> Library:
    """Loads and tests a library in this process. Raises SelfTestFailed if the library is wrong, and NotNow if anything
    else fails: then the next library would fail, too."""
    try:
        library = Library(path)
    except AttributeError as error:
        raise SelfTestFailed(f"it lacks a function: {error}") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        check(library)
    except SelfTestFailed:
        raise
    except Exception as error:
        raise NotNow(f"{path.name} could not be tested: {type(error).__name__}: {error}") from error
    return library


def _unreadable(path: Path, error: OSError) -> SelfTestFailed | NotNow:
    says = (error.strerror or str(error)).removeprefix(f"{path}: ")
    if not path.exists() or _NOT_FOR_HERE.search(says):
        return SelfTestFailed(f"it cannot be read: {says}")
    return NotNow(f"{path.name} could not be tested: {says}")


def _prepare(cache: Path) -> None:
    """Checks who may write to the folder: whoever may, can run code in this process."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = cache.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise CannotBuild(
            f"the folder {cache} must belong to the user of this process, and nobody else may write to it"
        )
    for folder in cache.glob("build-*"):
        with suppress(FileNotFoundError):  # another process has ended its build
            if time.time() - folder.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _remove_unused(ours: Path) -> None:
    """Remove libraries that no process has loaded for long. A process that uses such a library keeps it in memory. A
    process whose library disappears between check and load builds a new one."""
    for path in ours.parent.glob("*.so"):
        with suppress(OSError):
            if path != ours and _NAME.fullmatch(path.name) and time.time() - path.stat().st_mtime > UNUSED_SECONDS:
                path.unlink()
                mark_of(path).unlink(missing_ok=True)


passed: set[str] = set()
"""The digests of the libraries that passed their test in another process since this process began. A test takes seconds
of a core."""


def _test_in_a_process(library: Path) -> None:
    """Raises SelfTestFailed if the library is wrong, and NotNow."""
    try:
        digest = _digest_of(library)
    except OSError as error:
        raise _unreadable(library, error) from error
    if digest in passed:
        return
    try:
        ran = run([sys.executable, "-P", "-m", "motet_kernels.cpp", str(library)], seconds=TEST_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NotNow(f"{library.name} could not be tested: it took more than {TEST_SECONDS:.0f} s") from error
    except OSError as error:
        raise NotNow(f"{library.name} could not be tested: {error.strerror or error}") from error
    if ran.returncode:
        reason = first_error(ran.stderr) or f"its test ended with status {ran.returncode}"
        crashed = -ran.returncode in CRASHES and not any(lack in ran.stderr for lack in _CRASHED_FOR_LACK)
        if ran.returncode == WRONG or crashed:
            raise SelfTestFailed(reason)
        raise NotNow(f"{library.name} could not be tested: {reason}")
    passed.add(digest)
