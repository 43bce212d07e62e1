"""Wheels that carry the compiled kernels: whoever installs one needs no compiler."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from motet_kernels.cpp import builder
from motet_kernels.cpp.compiler import NAMES, cpu_flags, instruction_sets
from testbed.compiled_kernels import CACHE, needs_a_compiler
from testbed.tree import ROOT
from tools.wheels import FOLDER, GLIBC, CannotBuildWheel, glibc_in, pure_wheel, tag, with_libraries

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
        recorded = {line.split(",")[0] for line in after.read(f"{information}/RECORD").decode().splitlines()}
        assert recorded == set(names)
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
    content = Path(built.library.loaded._name).read_bytes()  # noqa: SLF001 - as ctypes names it
    wheel = tmp_path / pure.name.replace("py3-none-any", f"py3-none-{sysconfig.get_platform().replace('-', '_')}")
    name = builder._file_name(instructions)  # noqa: SLF001
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
