"""Where things lie, and what would break silently if they lay elsewhere."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from testbed.tree import ROOT, package_folders, pyproject, tracked, tracked_text


def test_the_operators_folder_is_no_package() -> None:
    """With an __init__.py it would shadow the standard library's `operator` for every tool started at the root."""
    assert not (ROOT / "operator" / "__init__.py").exists()
    out = subprocess.run(
        [sys.executable, "-c", "import operator; print(operator.__file__)"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert not out.startswith(str(ROOT / "operator"))


def test_every_folder_of_tests_is_a_package() -> None:
    folders = {parent for path in tracked(ROOT / "tests") if path.suffix == ".py" for parent in path.parents}
    inside = {folder for folder in folders if folder == ROOT / "tests" or ROOT / "tests" in folder.parents}
    assert [folder for folder in sorted(inside) if not (folder / "__init__.py").exists()] == []


def test_every_package_is_typed_and_says_what_it_is_for() -> None:
    for folder in package_folders():
        assert (folder / "py.typed").exists(), folder.name
        assert (folder / "__init__.py").read_text().startswith('"""'), f"{folder.name} has no docstring"


def test_the_architecture_page_names_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert [folder.name for folder in package_folders() if str(folder.relative_to(ROOT)) not in page] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(built)


def test_the_wheel_holds_exactly_the_listed_packages(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    information = {top for top in tops if top.endswith(".dist-info")}
    assert len(information) == 1
    assert tops - information == {folder.name for folder in package_folders()}


def test_the_wheel_holds_every_file_of_its_packages(wheel: zipfile.ZipFile) -> None:
    held = set(wheel.namelist())
    for folder in package_folders():
        wanted = {path.relative_to(folder.parent).as_posix() for path in tracked(folder)}
        assert wanted - held == set()


def test_the_wheel_holds_no_stray_files(wheel: zipfile.ZipFile) -> None:
    odd = re.compile(r"(__pycache__|\.pyc$|\.log$|\.db$|\.sock$|\.cache)")
    assert [name for name in wheel.namelist() if odd.search(name)] == []


def test_the_bundled_model_stays_small(wheel: zipfile.ZipFile) -> None:
    bundled = [entry for entry in wheel.infolist() if entry.filename.startswith("motet_cli/bundled/")]
    assert sum(entry.compress_size for entry in bundled) <= 8 * 1024 * 1024


def test_the_wheel_carries_the_licence_and_the_command(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "motet = motet_cli.main:main" in wheel.read(entry_points).decode()


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert pyproject()["project"]["license"] == "Apache-2.0"


def test_there_is_an_extra_for_every_deployable_and_one_for_all() -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    deployables = {"gateway", "scheduler", "supervisor", "predictor", "runner", "operator", "cli"}
    assert deployables <= extras.keys()
    (local,) = extras["local"]
    named = set(local.removeprefix("motet[").removesuffix("]").split(","))
    assert deployables <= named


def test_no_file_names_a_machine() -> None:
    """Paths of somebody's disk, and addresses of somebody's package index."""
    machine = re.compile(r"(?<![\w.}~-])/(?:home|root|Users|work|workspace)/\w|--(?:extra-)?index-url[= ]https?://")
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path, text in tracked_text()
        if path != Path(__file__)
        for match in machine.finditer(text)
    ]
    assert found == []


def test_no_file_is_large_by_accident() -> None:
    large = [path for path in tracked() if path.stat().st_size > 1024 * 1024 and path.suffix != ".safetensors"]
    assert large == []


def test_the_ci_script_is_executable_and_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^make test\b", script.read_text(), re.MULTILINE)
