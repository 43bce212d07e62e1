"""The recorded terminal shows commands that there are. tests/stack/test_front_page.py records it anew."""

import re
import shlex
from xml.etree import ElementTree as ET

import pytest
from typer.main import get_command

from motet_cli.main import app
from testbed.tree import ROOT
from tools.record_terminal import COMMANDS, PICTURE

README = (ROOT / "README.md").read_text()


def shown() -> str:
    """All text of the picture, without spaces: where lines are cut does not count."""
    return re.sub(r"\s", "", "".join(ET.parse(PICTURE).getroot().itertext()))


def test_the_readme_shows_the_picture() -> None:
    assert re.search(rf"^!\[.{{40,}}\]\({PICTURE.relative_to(ROOT)}\)$", README, re.MULTILINE)


def test_the_picture_shows_the_commands_that_the_script_types() -> None:
    at = 0
    for command in COMMANDS:
        at = shown().find("$" + re.sub(r"\s", "", command), at)
        assert at >= 0, f"{command}: run python -m tools.record_terminal"


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("motet ")])
def test_a_command_in_the_picture_is_one_of_the_command_line(command: str) -> None:
    _, name, *arguments = shlex.split(command)
    group = get_command(app)
    group.commands[name].make_context(name, arguments)  # parses; what is unknown is an error


def test_the_picture_loads_no_other_file() -> None:
    assert re.findall(r"url\((?!#)|<image|@import", PICTURE.read_text()) == []
