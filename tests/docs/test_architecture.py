"""What docs/architecture.md draws of the engine is what is there, and what import-linter checks."""

import re

import pytest

from testbed.tree import ROOT, pyproject
from tests.docs.pages import DOCS

PAGE = (DOCS / "architecture.md").read_text()
EXECUTE = "motet_runner.execute"
ROOM = re.compile(r"^\| (\d+) \| \[(\w+)\]\([^)]*/execute/\2/__init__\.py\) \|", re.MULTILINE)


def test_the_page_draws_each_room_of_the_engine_on_its_floor() -> None:
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    (layers,) = [one["layers"] for one in contracts if one.get("containers") == [EXECUTE]]
    checked = {room.strip(): floor for floor, rooms in enumerate(reversed(layers), 1) for room in rooms.split("|")}
    drawn = {room: int(floor) for floor, room in ROOM.findall(PAGE)}
    assert drawn == checked
    folder = ROOT / "services/gpu-runner" / EXECUTE.replace(".", "/")
    assert drawn.keys() == {path.parent.name for path in folder.glob("*/__init__.py")}


@pytest.mark.parametrize("package", ["services/gpu-runner/motet_runner", "kernels/motet_kernels"])
def test_each_folder_of_the_engine_has_a_line(package: str) -> None:
    lines = set(re.findall(rf"^\| `{package}/(\w+)` \|", PAGE, re.MULTILINE))
    assert lines == {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
