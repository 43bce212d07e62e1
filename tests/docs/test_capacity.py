"""The page on capacity, typed by somebody who does nothing but read it."""

import json
import os
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

from motet_simulator.workloads.traces import _KEYS
from tests.docs.blocks import Shell, blocks
from tests.docs.pages import DOCS, rows

PAGE = DOCS / "guides" / "capacity.md"


def test_the_page_plans(tmp_path: Path) -> None:
    programs, folder = tmp_path / "bin", tmp_path / "reader"
    programs.mkdir()
    folder.mkdir()
    motet = programs / "motet"
    motet.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m motet_cli.main "$@" 2>&1\n')
    motet.chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MOTET_")}
    env = outside | {"PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "400"}
    with Shell(folder, scratch=tmp_path, env=env) as shell:
        for block in blocks(PAGE):
            if block.runs:
                shell.run(block)
    assert ET.parse(folder / "plan.svg").getroot().tag.endswith("svg")
    answer = json.loads((folder / "answer.json").read_text())
    assert answer["runners"] is None
    assert "tpot" in answer["sentence"]
    assert "above 5 ms" in answer["sentence"]


def test_every_key_of_a_workload_is_explained() -> None:
    assert {key.strip("`") for key, *_ in rows(PAGE, "The workload")} == _KEYS
