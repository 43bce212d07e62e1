"""mkdocs calls this module while it builds docs/ into a site (mkdocs.yml): it adds pages for all linked files.

A page may link to any file of the repository, and GitHub opens that file. A site has only docs/, so each linked file
becomes a page of the site, outside of the navigation and the search. The site never links to the repository.
"""

import posixpath
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/"
MADE = "repository/"
"""The folder of the site with the pages that this module adds."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)(?P<target>[^)#\s]+)(?P<fragment>#[^)\s]+)?(?=\))")
LEXERS = {"": "text", ".tpl": "text", ".txt": "text", ".pyi": "python"}
HIDDEN = re.compile(r"[._]|.*\.egg-info$")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every linked file, and for the files that an added page links to."""
    open_pages = [(f"{DOCS}{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    made: set[str] = set()
    while open_pages:
        path, text = open_pages.pop()
        for linked in set(linked_files(path, text)) - made:
            made.add(linked)
            files.append(File.generated(config, page_of(linked), content=content(linked)))
            if linked.endswith(".md"):
                open_pages.append((linked, (ROOT / linked).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Change the links of a page so that they lead to pages of the site."""
    here = page.file.src_uri
    path = here.removeprefix(MADE).removesuffix(".md") if here.startswith(MADE) else f"{DOCS}{here}"
    if here.startswith(MADE) and not path.endswith(".md"):
        return markdown  # a file in a code block has no links
    return LINK.sub(partial(_rewritten, here, path), markdown)


def linked_files(path: str, text: str) -> Iterator[str]:
    """The files and folders outside of docs/ that a page links to, as paths from the root."""
    for link in LINK.finditer(text):
        target = target_of(path, link["target"])
        if not f"{target}/".startswith(DOCS) and (ROOT / target).exists():
            yield target


def target_of(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def page_of(path: str) -> str:
    """The page of a file on the site. docs/ is the root; every other file has a page of its own."""
    if f"{path}/".startswith(DOCS):
        return "index.md" if (ROOT / path).is_dir() else path.removeprefix(DOCS)
    return f"{MADE}{path}.md"


def content(path: str) -> str:
    """The Markdown of the page for a file or a folder of the repository."""
    head = "---\nsearch: {exclude: true}\n---\n"
    source = ROOT / path
    if source.is_dir():
        names = sorted(f"{one.name}/" if one.is_dir() else one.name for one in source.iterdir())
        return f"{head}# {path}/\n\n" + "".join(f"- `{name}`\n" for name in names if not HIDDEN.match(name))
    text = source.read_text()
    if path.endswith(".md"):
        return head + text
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    lexer = LEXERS.get(source.suffix, source.suffix[1:])
    return f"{head}# {path}\n\n{fence}{lexer}\n{text.rstrip()}\n{fence}\n"


def _rewritten(here: str, path: str, link: re.Match[str]) -> str:
    target = target_of(path, link["target"])
    if not (ROOT / target).exists():
        return link[0]  # mkdocs reports a link that leads nowhere
    of_a_page = target.endswith(".md")
    return posixpath.relpath(page_of(target), posixpath.dirname(here)) + (link["fragment"] or "" if of_a_page else "")
