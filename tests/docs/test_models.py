"""The page of models lists the families that the tests prove, and nothing else."""

from testbed.tree import ROOT
from tests.runner.families import EVERY_LINEAR, FAMILIES, MORE, WRAPPED


def rows() -> list[str]:
    return [
        f"| {family.name} | {'every linear layer' if family.targets == EVERY_LINEAR else 'attention'} | `make {word}` |"
        for families, word in ((FAMILIES, "test"), (MORE, "soak"))
        for family in families
    ]


def test_the_page_has_the_families_of_the_tests() -> None:
    """If this fails, copy the lines that it prints."""
    page = (ROOT / "docs" / "models.md").read_text().splitlines()
    start = page.index("| family | adapters in the tests | run by |") + 2
    assert page[start : page.index("", start)] == rows(), "\n".join(rows())


def test_the_page_has_the_models_of_text_and_images_of_the_tests() -> None:
    page = (ROOT / "docs" / "models.md").read_text().splitlines()
    start = page.index("| model of text and images |") + 2
    assert page[start : page.index("", start)] == [f"| {family.name} |" for family in WRAPPED]
