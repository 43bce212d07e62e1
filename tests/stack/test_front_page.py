"""The promises of README.md: it runs with what `make up` installs, and its picture shows a real terminal."""

import os
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from testbed.ports import free_port
from testbed.tree import ROOT
from tests.support.installed import install
from tools.record_terminal import COMMANDS

pytestmark = pytest.mark.stack

NOT_NEEDED = ("pytest", "peft", "openai", "kubernetes", "hypothesis", "asyncpg")
"""Tests need these, and `make up` does not install them."""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The programs of an environment as `make up` makes it."""
    made = install("local", tmp_path / "environment")
    code = "import importlib.util as u, sys; print(*filter(u.find_spec, sys.argv[1:]))"
    found = subprocess.run(
        [made / "python", "-P", "-c", code, "torch", *NOT_NEEDED],
        env=environment(),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert found == "torch\n"
    return made


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_recorded_terminal_runs_with_what_make_up_installs(programs: Path, tmp_path: Path) -> None:
    picture = tmp_path / "terminal.svg"
    done = subprocess.run(
        [programs / "python", "-m", "tools.record_terminal", "--out", picture, "--port", str(free_port())],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    drawn = re.sub(r"\s", "", "".join(ET.parse(picture).getroot().itertext()))
    assert [command for command in COMMANDS if "$" + re.sub(r"\s", "", command) not in drawn] == []
    assert "Arr,matey!" in drawn
    assert "127.0.0.1:8000" in drawn
