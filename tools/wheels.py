"""Build the product's wheels (`make wheel`): a pure one, and one with the compiled kernels for each architecture.

Who installs one of the latter needs no compiler. Zig compiles: for other CPUs, too, for an old glibc, and with the C++
runtime in each library. auditwheel says which glibc the result needs. The libraries for this machine's CPU are tested
here; all others are tested where they run, before they serve.
"""

import argparse
import base64
import csv
import hashlib
import io
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

from motet_kernels.cpp import builder
from motet_kernels.cpp.compiler import CompilerError, NotNow

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 28)
"""The oldest one that the libraries run with: that of torch's own wheels"""
LOADERS = ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")
PURE = "py3-none-any"
FOLDER = "motet_kernels/cpp/libraries"
OF_GLIBC = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", *LOADERS}
"""The only libraries that ours may need: each machine has these, and not each has a C++ runtime."""

_HEADER = struct.Struct("<32xQ14xHH4x")
"""Where the segments' table is, how long an entry is, and how many there are"""
_SEGMENT = struct.Struct("<I4xQQ8xQ16x")
"""Kind, place in the file, address, bytes in the file"""
_ENTRY = struct.Struct("<qQ")
_PT_LOAD, _PT_DYNAMIC, _DT_NEEDED, _DT_STRTAB = 1, 2, 1, 5


class CannotBuildWheel(Exception):
    pass


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


# ----------------------------------------------------------------------------------------------- decisions, without I/O


def tag(machine: str) -> str:
    return f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"


def glibc_in(report: str) -> tuple[int, int]:
    """The glibc that a wheel needs, from what `auditwheel show` says."""
    found = re.search(r'"manylinux_(\d+)_(\d+)_\w+"', report)
    if found is None:
        raise CannotBuildWheel(f"auditwheel names no manylinux version: {report.strip()}")
    return int(found[1]), int(found[2])


def check_glibc(wheel: str, needs: tuple[int, int]) -> None:
    if needs > GLIBC:
        raise CannotBuildWheel(f"{wheel} would need glibc {needs[0]}.{needs[1]}: its name says less.")


def check_needed(library: str, content: bytes) -> None:
    if others := needed(content) - OF_GLIBC:
        raise CannotBuildWheel(f"{library} needs {', '.join(sorted(others))}, which not every machine has.")


def needed(library: bytes) -> set[str]:
    """The libraries that a library names as needed (DT_NEEDED of ELF, for 64 bits, low bytes first)."""
    start, size, count = _HEADER.unpack_from(library)
    segments = [_SEGMENT.unpack_from(library, start + number * size) for number in range(count)]
    (dynamic,) = [segment for segment in segments if segment[0] == _PT_DYNAMIC]
    entries = list(_ENTRY.iter_unpack(library[dynamic[1] : dynamic[1] + dynamic[3]]))
    (address,) = [value for kind, value in entries if kind == _DT_STRTAB]
    (names,) = [offset + address - at for kind, offset, at, length in segments
                if kind == _PT_LOAD and at <= address < at + length]  # fmt: skip
    starts = [names + value for kind, value in entries if kind == _DT_NEEDED]
    return {library[first : library.index(b"\0", first)].decode() for first in starts}


def with_libraries(pure: bytes, libraries: Mapping[str, bytes], machine: str) -> bytes:
    """A pure wheel with these files beside the kernels' modules, for one architecture."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(pure)) as given, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as wheel:
        (information,) = {name.partition("/")[0] for name in given.namelist() if ".dist-info/" in name}
        recorded = [row for row in csv.reader(given.read(f"{information}/RECORD").decode().splitlines()) if row]
        named = {f"{information}/WHEEL": _told(given.read(f"{information}/WHEEL").decode(), machine).encode()}
        named |= {f"{FOLDER}/{name}": content for name, content in libraries.items()}
        date = given.getinfo(f"{information}/WHEEL").date_time
        for entry in given.infolist():
            if entry.filename not in (*named, f"{information}/RECORD"):
                wheel.writestr(entry, given.read(entry))
        for name, content in named.items():
            wheel.writestr(_entry(name, date), content)
        rows = [row for row in recorded if row[0] not in named and row[1]]
        rows += [[name, _digest(content), str(len(content))] for name, content in named.items()]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, [f"{information}/RECORD", "", ""]])
        wheel.writestr(_entry(f"{information}/RECORD", date), text.getvalue())
    return made.getvalue()


def _entry(name: str, date: tuple[int, int, int, int, int, int]) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, date)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o100644 << 16
    return entry


def _told(wheel: str, machine: str) -> str:
    """The file WHEEL of such a wheel."""
    return wheel.replace(f"Tag: {PURE}", f"Tag: {tag(machine)}").replace("Purelib: true", "Purelib: false")


def _digest(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


# ---------------------------------------------------------------------------------------------------------------- steps


def pure_wheel(into: Path) -> Path:
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(into), versions=["standard"])
    return Path(built)


def compiled(machine: str, into: Path) -> list[Path]:
    zig = into / "c++"
    target = f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    zig.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang c++ -target {target} -s "$@"\n')
    zig.chmod(0o755)
    try:
        return builder.install(into / machine, str(zig), machine)
    except (CompilerError, NotNow) as error:
        raise CannotBuildWheel(f"The kernels for {machine} could not be compiled: {error}.") from error


def tested(machine: str, libraries: Iterable[Path]) -> Iterator[str]:
    """The instruction sets whose library this machine has tested. Raises CannotBuildWheel for one that is wrong."""
    if machine != platform.machine():
        return
    here = {one.name for one in builder.usable_sets([])}
    for library in libraries:
        name = library.name.rpartition("-")[0]
        if name in here:
            command = [sys.executable, "-P", "-m", "motet_kernels.cpp", str(library)]
            try:
                ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=builder.TEST_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise CannotBuildWheel(f"The test of {library.name} took {error.timeout:.0f} s.") from error
            if ran.returncode:
                raise CannotBuildWheel(f"{library.name} fails its test: {ran.stderr.strip()}.")
            yield name


def glibc_of(wheel: Path) -> tuple[int, int]:
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise CannotBuildWheel(f"auditwheel cannot read {wheel.name}: {ran.stderr.strip()}")
    return glibc_in(ran.stdout)


def build(into: Path, machines: Iterable[str]) -> list[Path]:
    into.mkdir(parents=True, exist_ok=True)
    pure = pure_wheel(into)
    say(f"{pure.name}: without compiled kernels")
    made = [pure]
    for machine in machines:
        with tempfile.TemporaryDirectory(prefix="motet-wheel-") as work:
            libraries = compiled(machine, Path(work))
            ran = list(tested(machine, libraries))
            contents = {path.name: path.read_bytes() for path in libraries}
            for name, content in contents.items():
                check_needed(name, content)
            unchecked = Path(work) / pure.name.replace(PURE, tag(machine))
            unchecked.write_bytes(with_libraries(pure.read_bytes(), contents, machine))
            needs = glibc_of(unchecked)
            check_glibc(unchecked.name, needs)
            wheel = Path(shutil.copy(unchecked, into))
        said = f"tested here: {', '.join(ran)}" if ran else "untested: this machine cannot run them"
        say(f"{wheel.name}: {len(contents)} libraries, glibc {needs[0]}.{needs[1]} or newer; {said}")
        made.append(wheel)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description="Build the product's wheels.")
    parser.add_argument("--into", type=Path, default=ROOT / "dist", metavar="DIR", help="where (default: dist)")
    parser.add_argument("--machines", nargs="*", choices=MACHINES, default=MACHINES, help="which (default: all)")
    given = parser.parse_args()
    try:
        build(given.into, given.machines)
    except CannotBuildWheel as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
