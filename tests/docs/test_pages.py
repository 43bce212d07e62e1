"""Pages are made of what can be tried."""

import subprocess

import pytest

from motet.resources import read_text
from tests.docs.blocks import Block, blocks
from tests.docs.pages import DOCS, written_pages
from tests.repo.tree import ROOT

EXECUTED = {"tutorials/kubernetes.md", "guides/platform.md", "guides/tenant.md"}
"""By tests/kube/test_tutorial.py and tests/kube/test_guides.py."""

BLOCKS = [block for page in (*written_pages(), ROOT / "README.md") for block in blocks(page)]
SHELL = [block for block in BLOCKS if block.kind in ("sh", "console")]
EXCUSED_AT_MOST = 3


def test_a_block_is_of_a_kind_that_is_tried() -> None:
    assert {str(block): block.kind for block in BLOCKS if block.kind not in ("sh", "console", "yaml")} == {}


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_a_shell_block_is_shell(block: Block) -> None:
    for step in block.steps:
        done = subprocess.run(["bash", "-n"], input=step.command, text=True, capture_output=True, check=False)
        assert not done.stderr


def test_few_blocks_of_the_executed_pages_are_not_run_and_each_says_why() -> None:
    excused = [block for block in SHELL if not block.runs]
    assert all(len(block.reason_not_to_run) > 20 for block in excused)
    assert len(excused) <= EXCUSED_AT_MOST


def test_a_page_with_shell_blocks_is_executed() -> None:
    of_docs = {str(block.page.relative_to(DOCS)) for block in SHELL if block.page.is_relative_to(DOCS)}
    assert of_docs <= EXECUTED


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "yaml"], ids=str)
def test_a_manifest_on_a_page_is_valid(block: Block) -> None:
    assert [str(problem) for problem in read_text(block.text, file=str(block)).problems] == []
