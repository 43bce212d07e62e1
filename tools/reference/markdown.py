"""Parts of a page in Markdown."""

import re


def note(origin: str) -> str:
    return f"<!-- Generated from {origin}: change that, not this file, and run `make generate`. -->\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells) + "\n"


def code(text: object) -> str:
    return f"`{text}`" if str(text) else ""


def flat(text: str) -> str:
    """The text in one line, for a cell of a table."""
    return " ".join(text.split())


def anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")
