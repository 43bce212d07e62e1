"""Wheels that carry the compiled kernels: whoever installs one needs no compiler."""

import csv
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from base64 import urlsafe_b64encode
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest

from motet_kernels.cpp import builder
from motet_kernels.cpp.compiler import NAMES, cpu_flags, instruction_sets
from testbed.compiled_kernels import CACHE, needs_a_compiler
from testbed.tree import ROOT
from tools import wheels
from tools.wheels import (
    FOLDER,
    GLIBC,
    MACHINES,
    CannotBuildWheel,
    check_needed,
    glibc_in,
    needed,
    pure_wheel,
    tag,
    with_libraries,
)

MACHINE = "x86_64"


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pure_wheel(tmp_path_factory.mktemp("pure"))


class Environment:
    """A fresh virtual environment with a wheel, beside the packages of this one that the wheel requires."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        venv.create(folder, symlinks=True)
        self.packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
        # As a path alone: the files *.pth there, with the product's own sources, do not count.
        (self.packages / "others.pth").write_text(sysconfig.get_path("purelib"))
        pip = [sys.executable, "-m", "pip", f"--python={folder}/bin/python", "--disable-pip-version-check"]
        command = [*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--ignore-installed", wheel]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def prints(self, script: str, *arguments: str | Path) -> list[str]:
        without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [self.folder / "bin/python", "-P", "-c", script, *arguments],
            env=without | {"PATH": "/nowhere"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


def hash_and_size(content: bytes) -> list[str]:
    """As the specification of wheels has them: base64 for URLs, without its padding."""
    return ["sha256=" + re.sub("=+$", "", urlsafe_b64encode(hashlib.sha256(content).digest()).decode()),
            str(len(content))]  # fmt: skip


def test_a_platform_wheel_is_the_pure_one_with_libraries(pure: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.whl"
    made.write_bytes(with_libraries(pure.read_bytes(), {"a.so": b"one", "b.so": b"two"}, MACHINE))
    with zipfile.ZipFile(pure) as before, zipfile.ZipFile(made) as after:
        names = after.namelist()
        assert sorted(names) == sorted([*before.namelist(), f"{FOLDER}/a.so", f"{FOLDER}/b.so"])
        assert names[-1].endswith(".dist-info/RECORD")
        (information,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        told = after.read(f"{information}/WHEEL").decode()
        assert (f"Tag: {tag(MACHINE)}\n" in told, "Root-Is-Purelib: false\n" in told) == (True, True)
        recorded = {name: row for name, *row in csv.reader(after.read(f"{information}/RECORD").decode().splitlines())}
        assert recorded.pop(f"{information}/RECORD") == ["", ""]
        assert recorded == {name: hash_and_size(after.read(name)) for name in names[:-1]}
        changed = [name for name in before.namelist() if before.read(name) != after.read(name)]
        assert {Path(name).name for name in changed} == {"WHEEL", "RECORD"}


@pytest.mark.parametrize(
    ("report", "glibc"),
    [
        ('The following external versioned symbols\nconsistent with the\ntag: "manylinux_2_28_aarch64".', (2, 28)),
        ('platform tag:\n"manylinux_2_5_x86_64".', (2, 5)),
        ('platform tag: "linux_x86_64".', None),
    ],
)
def test_auditwheel_names_the_oldest_glibc(report: str, glibc: tuple[int, int] | None) -> None:
    if glibc is None:
        with pytest.raises(CannotBuildWheel, match="names no manylinux version"):
            glibc_in(report)
    else:
        assert glibc_in(report) == glibc


def library(path: Path, *options: str) -> Path:
    """A small one of this machine's compiler."""
    path.with_suffix(".cpp").write_text(
        '#include <string>\nextern "C" int length() { return std::string("x").size(); }'
    )
    command = [needs_a_compiler(), "-shared", "-fPIC", "-o", path, path.with_suffix(".cpp"), *options]
    subprocess.run(command, check=True)
    return path


@pytest.mark.parametrize("runtime", ["libstdc++.so.6", "libgcc_s.so.1", "libc++.so.1"])
def test_a_library_of_a_wheel_needs_only_those_of_glibc(runtime: str, tmp_path: Path) -> None:
    own = library(tmp_path / "own.so", "-nostdlib", "-Wl,--no-as-needed", "-lc", "-lm")
    assert needed(own.read_bytes()) == {"libc.so.6", "libm.so.6"}
    check_needed(own.name, own.read_bytes())
    library(tmp_path / runtime, "-nostdlib", f"-Wl,-soname={runtime}")
    bad = library(tmp_path / "bad.so", "-nostdlib", "-Wl,--no-as-needed", "-lc", f"-L{tmp_path}", f"-l:{runtime}")
    with pytest.raises(CannotBuildWheel, match=rf"bad\.so needs {re.escape(runtime)}, "):
        check_needed(bad.name, bad.read_bytes())


def test_a_library_is_tested_on_a_machine_that_can_run_it(tmp_path: Path) -> None:
    needs_a_compiler()
    built = builder.build(CACHE)
    good = tmp_path / f"{built.instructions}-0.so"
    good.symlink_to(built.library.path)
    assert list(wheels.tested(platform.machine(), [good])) == [built.instructions]
    assert list(wheels.tested("riscv64", [good])) == []
    wrong = library(tmp_path / f"{built.instructions}-1.so")
    with pytest.raises(CannotBuildWheel, match=rf"{re.escape(wrong.name)} fails its test: "):
        list(wheels.tested(platform.machine(), [wrong]))


OTHER = next(one for one in MACHINES if one != platform.machine())


@pytest.mark.parametrize(
    ("machine", "options", "glibc", "refusal"),
    [
        (OTHER, ["-nostdlib"], GLIBC, ""),
        (OTHER, ["-nostdlib"], (GLIBC[0], GLIBC[1] + 1), r"would need glibc 2\.29"),
        (OTHER, ["-Wl,--no-as-needed", "-lstdc++"], GLIBC, r"needs .*libstdc\+\+"),
        (platform.machine(), ["-nostdlib"], GLIBC, "fails its test"),
    ],
    ids=["right", "for a newer glibc", "with a C++ runtime of the machine", "wrong"],
)
def test_only_a_wheel_that_passes_all_checks_is_there(
    *,
    machine: str,
    options: list[str],
    glibc: tuple[int, int],
    refusal: str,
    pure: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With this machine's compiler, and without auditwheel; `make soak` has Zig and auditwheel."""
    (instructions, *_) = builder.usable_sets([])
    monkeypatch.setattr(wheels, "compiled", lambda _, into: [library(into / f"{instructions.name}-0.so", *options)])
    monkeypatch.setattr(wheels, "glibc_of", lambda _: glibc)
    monkeypatch.setattr(wheels, "pure_wheel", lambda into: Path(shutil.copy(pure, into)))
    dist = tmp_path / "dist"
    with pytest.raises(CannotBuildWheel, match=refusal) if refusal else nullcontext():
        wheels.build(dist, [machine])
    assert [one.name for one in dist.glob(f"*{tag(machine)}.whl")] == (
        [] if refusal else [pure.name.replace("py3-none-any", tag(machine))]
    )


SERVES = f"""
import shutil, sys
from pathlib import Path
import motet_kernels
from motet_kernels.cpp import build
assert Path(motet_kernels.__file__).is_relative_to(sys.prefix), motet_kernels.__file__
assert not [name for name in {NAMES} if shutil.which(name)]
built = build(Path(sys.argv[1]))
print(built.instructions, built.seconds)
"""


def test_an_installed_wheel_needs_no_compiler(pure: Path, tmp_path: Path) -> None:
    """With the library of this machine's own compiler, which is there already."""
    needs_a_compiler()
    built = builder.build(CACHE)
    (instructions,) = [one for one in instruction_sets(cpu_flags()) if one.name == built.instructions]
    content = built.library.path.read_bytes()
    wheel = tmp_path / pure.name.replace("py3-none-any", f"py3-none-{sysconfig.get_platform().replace('-', '_')}")
    name = builder.file_name(instructions)
    wheel.write_bytes(with_libraries(pure.read_bytes(), {name: content}, MACHINE))
    with zipfile.ZipFile(wheel) as made:
        assert [name for name in made.namelist() if name.startswith(FOLDER)]
    installed = Environment(tmp_path / "environment", wheel)
    assert installed.prints(SERVES, tmp_path / "cache") == [f"{instructions.name} 0.0"]
    assert not (tmp_path / "cache").exists()


ANSWERS = """
import sys
from pathlib import Path
from motet_runner.offline import OfflineEngine
engine = OfflineEngine(sys.argv[1], kernel_cache=Path(sys.argv[2]))
(answer,) = engine.generate([[{"role": "user", "content": "Who keeps the lighthouse of Brindle?"}]], max_tokens=16)
assert answer.text, answer.error
print(engine.engine.report().kernels.serving)
"""


@pytest.mark.soak
@pytest.mark.needs(lambda: find_spec("ziglang") and find_spec("auditwheel"), "ziglang and auditwheel: make wheel")
def test_make_wheel_builds_wheels_that_serve_without_a_compiler(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tools.wheels", "--into", tmp_path / "dist"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    (of_x86,) = (tmp_path / "dist").glob(f"*{tag('x86_64')}.whl")
    (of_arm,) = (tmp_path / "dist").glob(f"*{tag('aarch64')}.whl")
    assert (tmp_path / "dist" / of_x86.name.replace(tag("x86_64"), "py3-none-any")).exists()
    assert re.search(r"_x86_64\.whl: 5 libraries, glibc 2\.\d+ or newer; tested here: .*basic", ran.stderr)
    assert re.search(r"_aarch64\.whl: 1 libraries, .* untested", ran.stderr)
    assert f"manylinux_{GLIBC[0]}_{GLIBC[1]}" in of_arm.name
    installed = Environment(tmp_path / "environment", of_x86)
    (serving,) = installed.prints(ANSWERS, ROOT / "cli/motet_cli/bundled/model", tmp_path / "cache")
    assert serving.startswith("cpp (")
    shutil.rmtree(tmp_path)
