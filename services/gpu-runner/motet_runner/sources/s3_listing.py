"""Reads a page of a bucket's listing. Pure: it believes nothing that the store says."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote
from xml.etree.ElementTree import Element, ParseError, TreeBuilder, XMLParser

MAX_PAGE_BYTES = 4 << 20
"""The most bytes of a page. One of a thousand of the longest names, of 1,024 bytes each, has fewer."""

MAX_PAGES = 20
"""The most pages of a folder. The usual page lists a thousand files."""

MAX_FILES = 20_000
"""The most files of a folder."""

MAX_TOKEN_CHARACTERS = 2048

_NAME_HERE = re.compile(r"[^/\\]{1,255}")
_SIZE = re.compile(r"[0-9]{1,18}")
_ETAG = re.compile(r"[!#-~]{1,128}")


class NotAListing(Exception):
    """Says what is wrong, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Listed:
    size: int
    etag: str
    """Without quotation marks. Empty if the store tells none."""


@dataclass(frozen=True, slots=True)
class Page:
    files: Mapping[str, Listed]
    """By the name in the folder. Files of further folders and names that no file of ours can have are left out."""
    next: str
    """The token of the next page; empty if this is the last one."""


def query(prefix: str, token: str) -> str:
    """The query of one page: of the files in the folder, not of those in its folders."""
    words = {"delimiter": "/", "encoding-type": "url", "list-type": "2", "prefix": prefix}
    if token:
        words["continuation-token"] = token
    return "&".join(f"{name}={quote(value, safe='')}" for name, value in sorted(words.items()))


def read_page(body: bytes, prefix: str) -> Page:
    """Raises NotAListing."""
    root = _parsed(body)
    if _name(root) != "ListBucketResult":
        raise NotAListing("it does not answer with a listing of a bucket")
    decode = unquote if _text(root, "EncodingType") == "url" else str
    files: dict[str, Listed] = {}
    for entry in root:
        if _name(entry) != "Contents":
            continue
        key = decode(_text(entry, "Key"))
        if not key.startswith(prefix):
            raise NotAListing("it lists files outside of the folder")
        name = key.removeprefix(prefix)
        if not (_NAME_HERE.fullmatch(name) and name.isprintable()) or name in (".", ".."):
            continue
        size, etag = _text(entry, "Size"), _text(entry, "ETag").strip('"')
        if etag.startswith("W/"):
            etag = ""  # it does not mean equal bytes
        if not _SIZE.fullmatch(size) or not (etag == "" or _ETAG.fullmatch(etag)):
            raise NotAListing("it lists a file whose size or ETag makes no sense")
        files[name] = Listed(int(size), etag)
    if _text(root, "IsTruncated") != "true":
        return Page(files, "")
    token = _text(root, "NextContinuationToken")
    if not 0 < len(token) <= MAX_TOKEN_CHARACTERS:
        raise NotAListing("it does not say where its listing goes on")
    return Page(files, token)


class _WithoutDoctype(TreeBuilder):
    def doctype(self, *_: object) -> None:
        raise NotAListing("its listing declares a document type, which may hold entities")


def _parsed(body: bytes) -> Element:
    parser = XMLParser(target=_WithoutDoctype())  # noqa: S314 - without a document type there are no entities
    try:
        parser.feed(body)
        root: Element = parser.close()
    except (ParseError, LookupError, ValueError):  # also an unknown encoding
        raise NotAListing("it does not answer with XML") from None
    return root


def _name(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _text(element: Element, name: str) -> str:
    return next((child.text or "" for child in element if _name(child) == name), "")
