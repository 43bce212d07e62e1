"""Whoever reads a reason finds it on the page."""

import re
from collections.abc import Mapping

import pytest

from motet.resources.reasons import ADAPTER_REASONS, POOL_REASONS, Reasons
from tests.docs.pages import DOCS

PAGE = (DOCS / "troubleshooting.md").read_text()


def section(heading: str) -> str:
    return re.split(rf"^## {heading}$", PAGE, maxsplit=1, flags=re.MULTILINE)[1].split("\n## ", 1)[0]


def entries(heading: str) -> dict[str, str]:
    parts = re.split(r"^### `(\w+)`$", section(heading), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("kind", "reasons"), [("LoRAAdapter", ADAPTER_REASONS), ("ServingPool", POOL_REASONS)])
def test_every_reason_has_its_entry_and_every_entry_its_reason(kind: str, reasons: Mapping[str, Reasons]) -> None:
    assert set(entries(kind)) == {reason for of_type in reasons.values() for reason in of_type}


@pytest.mark.parametrize("kind", ["LoRAAdapter", "ServingPool"])
def test_an_entry_says_what_is_seen_and_why_and_what_to_do(kind: str) -> None:
    lacking = {
        reason: word
        for reason, text in entries(kind).items()
        for word in ("Seen: ", "Do: ")
        if word not in text.replace("\n", " ")
    }
    assert lacking == {}
