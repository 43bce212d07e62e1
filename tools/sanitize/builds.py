"""The kernels with sanitizers, as a library for Python and as programs.

`python -m tools.sanitize.builds COMPILER ARGUMENT…` stands in for a compiler: the product asks it for its library, and
gets one with sanitizers. What else is compiled, the real one compiles.
"""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools.cache_folder import cache_folder

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = Path(__file__).parent / "source"
PRODUCT = ROOT / "kernels" / "motet_kernels" / "cpp" / "source"
CHECKS = ROOT / "tests" / "kernels" / "parallel_checks.cpp"
"""A program about threads, which has its own reports"""

OPTIONS = ("-O1", "-g1", "-std=c++17", "-fPIC", "-pthread", "-fno-omit-frame-pointer")
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREAD = ("-fsanitize=thread",)
RUNTIMES = ("libasan.so", "libubsan.so", "libtsan.so")

FOLDER = cache_folder(os.environ, "sanitize", named_by="MOTET_SANITIZE")
UNUSED_SECONDS = 30 * 24 * 3600.0
"""A part of a build that nobody has used for so long is removed."""


class CannotBuild(Exception):
    """The message says what is missing, or what the compiler said."""


@dataclass(frozen=True)
class Build:
    compiler: str
    sanitizer: tuple[str, ...]
    instructions: tuple[str, ...]
    """The options that choose them"""
    product: Path = PRODUCT
    """The folder of its sources"""

    def library(self, into: Path) -> None:
        self._link(["-shared"], self._parts(_checked(self.product)), into)

    def replay(self, into: Path) -> None:
        self._link([], self._parts([*_checked(self.product), SOURCE / "replay.cpp"]), into)

    def parallel_checks(self, into: Path) -> None:
        self._link([], self._parts([CHECKS, self.product / "parallel.cpp"]), into)

    def _parts(self, sources: Iterable[Path]) -> list[Path]:
        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            return list(compilers.map(self._part, sources))

    def _part(self, source: Path) -> Path:
        """A source, compiled now or before."""
        options = [*OPTIONS, *self.sanitizer, *self.instructions]
        read = [source, *sorted(self.product.glob("*.h")), *sorted(SOURCE.glob("*.h"))]
        if source.name.startswith("checked_"):
            read.append(self.product / source.name.removeprefix("checked_"))
        part = FOLDER / "parts" / f"{source.stem}-{_digest([_version(self.compiler), *options], read)}.o"
        if part.exists():
            part.touch()
            return part
        part.parent.mkdir(parents=True, exist_ok=True)
        unfinished = part.with_suffix(f".{os.getpid()}")
        folders = [f"-I{self.product}", f"-I{SOURCE}"]
        _run([self.compiler, *options, *folders, "-c", str(source), "-o", str(unfinished)])
        return unfinished.replace(part)

    def _link(self, options: Sequence[str], parts: Sequence[Path], into: Path) -> None:
        _run([self.compiler, *self.sanitizer, *options, "-pthread", *map(str, parts), "-o", str(into)])


def _checked(product: Path) -> list[Path]:
    """The product's sources. For those that Python calls, the one that includes them."""
    own = {one.name.removeprefix("checked_"): one for one in SOURCE.glob("checked_*.cpp")}
    return [
        SOURCE / "walk.cpp",
        SOURCE / "notes.cpp",
        *(own.get(one.name, one) for one in sorted(product.glob("*.cpp"))),
    ]


def runtime(compiler: str, name: str) -> Path:
    """A library of the compiler's"""
    found = Path(_run([compiler, f"-print-file-name={name}"]).strip())
    if not found.is_absolute():
        raise CannotBuild(f"{compiler} has no {name}. On Debian and Ubuntu: apt install g++. On Fedora: dnf install "
                          "gcc-c++ libasan libubsan libtsan")  # fmt: skip
    return found


def stand_in(compiler: str) -> Path:
    """A program that goes in place of this compiler. It forgets what is preloaded into Python."""
    path = FOLDER / "bin" / "c++"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = f'exec "{sys.executable}" -m tools.sanitize.builds "{compiler}" "$@"'
    path.write_text(f'#!/bin/sh\nunset LD_PRELOAD PYTHONMALLOC\nexport PYTHONPATH="{ROOT}"\n{command}\n')
    path.chmod(0o755)
    return path


def remove_unused() -> None:
    for part in (FOLDER / "parts").glob("*"):
        if time.time() - part.stat().st_mtime > UNUSED_SECONDS:
            part.unlink(missing_ok=True)


def main(compiler: str, arguments: list[str]) -> int:
    if arguments == ["--version"]:  # the product makes another library if it is another text
        print(_version(compiler), _digest([], sorted(SOURCE.iterdir())))  # noqa: T201
    elif str(PRODUCT / "library.cpp") in arguments:
        instructions = tuple(one for one in arguments if one.startswith("-m"))
        Build(compiler, ADDRESS, instructions).library(Path(arguments[arguments.index("-o") + 1]))
    else:
        return subprocess.run([compiler, *arguments], check=False).returncode
    return 0


def _digest(words: Iterable[str], files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for word in words:
        digest.update(word.encode() + b"\0")
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:24]


@cache
def _version(compiler: str) -> str:
    return _run([compiler, "--version"]).splitlines()[0]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], sys.argv[2:]))
    except CannotBuild as error:
        sys.exit(f"error: {error}")
