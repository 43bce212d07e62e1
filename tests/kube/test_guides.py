"""The guides, typed by somebody who has done the tutorial as far as they ask for."""

import pytest

from tests.docs.blocks import Block, Shell, blocks
from tests.repo.tree import ROOT

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]

DOCS = ROOT / "docs"


def of_tutorial(last_step: int) -> list[Block]:
    page = DOCS / "tutorials" / "kubernetes.md"
    text = page.read_text()
    end = text.count("\n", 0, text.index(f"\n## {last_step + 1}. "))
    return [block for block in blocks(page) if block.line <= end]


def test_the_guides_do_what_they_say(shell: Shell) -> None:
    guides = [block for name in ("tenant", "platform") for block in blocks(DOCS / "guides" / f"{name}.md")]
    for block in (*of_tutorial(5), *guides):
        if block.runs:
            shell.run(block)
