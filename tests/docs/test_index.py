"""docs/index.md and the navigation of the site name every page, so that a reader finds it."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.tree import ROOT, tracked
from tests.docs.pages import DOCS

INDEX = (DOCS / "index.md").read_text()
PAGES = {path.relative_to(DOCS).as_posix() for path in tracked(DOCS) if path.suffix == ".md"} - {"index.md"}
LINE = re.compile(r"- \[[^]]+\]\((?P<page>[^)#]+)\): \S.*\.")


def test_the_index_links_every_page() -> None:
    assert set(re.findall(r"\]\(([^)#:]+\.md)\)", INDEX)) >= PAGES, (
        "give it a line in docs/index.md, and one in mkdocs.yml"
    )


def test_the_index_gives_each_reader_some_pages_with_a_line_each() -> None:
    _, *readers = re.split(r"^## ", INDEX, flags=re.MULTILINE)
    for reader in readers:
        heading, _, *lines = reader.rstrip().split("\n")
        assert heading.startswith("You ")
        assert lines
        assert [line for line in lines if not LINE.fullmatch(line)] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strict: mkdocs refuses a page outside of the navigation, and a link or an anchor that leads nowhere."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_every_page(site: Path) -> None:
    assert [page for page in PAGES if not (site / page).with_suffix(".html").is_file()] == []


def test_a_link_to_a_file_of_the_repository_leads_to_a_page_with_it(site: Path) -> None:
    page = (site / "mechanisms.html").read_text()
    links = re.findall(r'href="(repository/[^"#]+)"', page)
    assert links
    assert [link for link in links if not (site / link).is_file()] == []
    assert "../services" not in page
    source = links[0].removeprefix("repository/").removesuffix(".html")
    shown = html.unescape(re.sub(r"<[^>]+>", "", (site / links[0]).read_text()))
    assert (ROOT / source).read_text().strip() in shown


def test_a_search_finds_pages_and_not_the_files_that_they_link_to(site: Path) -> None:
    found = {entry["location"] for entry in json.loads((site / "search/search_index.json").read_text())["docs"]}
    assert "troubleshooting.html" in found
    assert [location for location in found if location.startswith("repository/")] == []


def test_the_site_asks_no_other_host(site: Path) -> None:
    """It can be read where there is no internet."""
    for page in (site / "index.html", site / "guides" / "platform.html"):
        loaded = re.findall(r'<(?:script|link|img)\b[^>]*?(?:src|href)="(https?:[^"]*)"', page.read_text())
        assert loaded == []
