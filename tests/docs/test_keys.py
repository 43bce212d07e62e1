"""The page on API keys, typed by somebody who does nothing but read it."""

import os
import sys
from pathlib import Path

import pytest

from motet import keys
from motet_cli.key_commands import KEY_ONE_LINER
from tests.docs.blocks import Shell, blocks
from tests.docs.pages import DOCS, rows

PAGE = DOCS / "guides" / "keys.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the reader is."""
    (tmp_path / "reader").mkdir()
    return tmp_path / "reader"


def test_the_page_creates_working_keys(tmp_path: Path, folder: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    motet = programs / "motet"
    motet.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m motet_cli.main "$@"\n')
    motet.chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MOTET_")}
    env = outside | {"PATH": f"{programs}:{os.environ['PATH']}", "MOTET_DATA_DIR": str(tmp_path / "state")}
    with Shell(folder, scratch=tmp_path, env=env) as shell:
        for block in blocks(PAGE):
            assert block.runs
            shell.run(block)
    (line,) = (folder / "keys").read_text().splitlines()
    sent = keys.parse_key((folder / "zeta.key").read_text().strip())
    assert sent is not None
    assert keys.matches(keys.from_line(line), sent)


def test_the_page_has_the_one_liner_for_a_key() -> None:
    assert KEY_ONE_LINER in PAGE.read_text()


def test_every_scope_is_explained() -> None:
    assert [scope.split("`")[1] for scope, _ in rows(PAGE, "Make one")] == list(keys.KeyScope)
