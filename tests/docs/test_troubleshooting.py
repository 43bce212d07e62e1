"""A reader finds what they see: each symptom, and each reason of a condition."""

import re
from collections.abc import Mapping

import pytest

from motet.resources.reasons import ADAPTER_REASONS, POOL_REASONS, Reasons
from tests.docs.pages import DOCS, rows

PAGE = DOCS / "troubleshooting.md"
TEXT = PAGE.read_text()
KINDS = {"LoRAAdapter": ADAPTER_REASONS, "ServingPool": POOL_REASONS}
SYMPTOMS = ("An adapter", "A request is refused", "A pool or its runners", "The installation")
QUIET = "Reasons that need nothing"
SEARCHED_FOR = (
    "Pending", "429", "404", "401", "403", "422", "503", "504", "model_not_found", "pool_saturated", "invalid_api_key",
    "context_length_exceeded", "OOMKilled", "CUDA out of memory", "killed", "ImagePullBackOff", "PolicyDenied",
    "helm upgrade", "kubectl drain", "first token is slow", "[DONE]", "scale up", "motet up",
)  # fmt: skip


def section(heading: str) -> str:
    return re.split(rf"^## {heading}$", TEXT, maxsplit=1, flags=re.MULTILINE)[1].split("\n## ", 1)[0]


def entries(heading: str) -> dict[str, str]:
    parts = re.split(r"^### (.+)$", section(heading), flags=re.MULTILINE)
    return dict(zip(parts[1::2], (text.replace("\n", " ") for text in parts[2::2]), strict=True))


def quiet(kind: str) -> list[str]:
    """Reasons in the table at the end."""
    return [reason for of_kind, reason, _, _ in rows(PAGE, QUIET) if of_kind == kind]


def test_the_page_has_its_sections_in_order() -> None:
    assert tuple(re.findall(r"^## (.+)$", TEXT, re.MULTILINE)) == (*SYMPTOMS, *KINDS, QUIET)


@pytest.mark.parametrize("word", SEARCHED_FOR)
def test_a_common_search_word_occurs_in_a_symptom(word: str) -> None:
    assert any(word in heading + text for part in SYMPTOMS for heading, text in entries(part).items())


@pytest.mark.parametrize("part", SYMPTOMS)
def test_a_symptom_has_a_meaning_a_check_and_a_remedy(part: str) -> None:
    form = re.compile(r"\s*Means: \S.*  See: \S.*  Do: \S.*")
    assert [heading for heading, text in entries(part).items() if not form.fullmatch(text)] == []


@pytest.mark.parametrize(("kind", "reasons"), KINDS.items())
def test_every_reason_has_its_entry_and_every_entry_its_reason(kind: str, reasons: Mapping[str, Reasons]) -> None:
    said = [*entries(kind), *quiet(kind)]
    assert len(said) == len(set(said))
    assert set(said) == {f"`{reason}`" for of_type in reasons.values() for reason in of_type}


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_says_what_is_seen_why_and_what_to_do_and_that_is_something(kind: str) -> None:
    form = re.compile(r"(\s*Seen: [^a-z].*?  Why: [^a-z].*?  Do: [^a-z].*?)+")
    lacking = {
        reason
        for reason, text in entries(kind).items()
        if not form.fullmatch(text) or re.search(r"Do: (nothing|wait)\.\s*$", text, re.IGNORECASE)
    }
    assert lacking == set()


def test_a_symptom_links_to_existing_entries() -> None:
    headings = {heading.strip("`").lower() for kind in KINDS for heading in entries(kind)}
    linked = set(re.findall(r"\]\(#([a-z]+)\)", TEXT)) - {kind.lower() for kind in KINDS}
    assert linked - headings == set()
