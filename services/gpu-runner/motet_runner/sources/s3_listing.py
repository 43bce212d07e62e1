"""Reads a page of a bucket's listing. Pure: it believes nothing that the store says."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote_plus
from xml.etree.ElementTree import ParseError, XMLParser

MAX_PAGE_BYTES = 4 << 20
"""The most bytes of a page. One of a thousand of the longest names, of 1,024 bytes each, has fewer."""

MAX_PAGES = 20
"""The most pages of a folder. The usual page lists a thousand files."""

MAX_FILES = 20_000
"""The most files of a folder."""

MAX_TOKEN_CHARACTERS = 2048

MAX_DEPTH = 8
MAX_ELEMENTS = 1 << 18
"""The most elements of a page, one in another and altogether. A file has about ten, four deep."""

_PIECE_BYTES = 1 << 16
_OF_PAGE = ("EncodingType", "IsTruncated", "NextContinuationToken")
_OF_FILE = ("ETag", "Key", "Size")

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
    found = _read(body)
    if found.root != "ListBucketResult":
        raise NotAListing("it does not answer with a listing of a bucket")
    decode = unquote_plus if found.texts.get("EncodingType") == "url" else str
    files: dict[str, Listed] = {}
    for entry in found.entries:
        key = decode(entry.get("Key", ""))
        if not key.startswith(prefix):
            raise NotAListing("it lists files outside of the folder")
        name = key.removeprefix(prefix)
        if not (_NAME_HERE.fullmatch(name) and name.isprintable()) or name in (".", ".."):
            continue
        size, etag = entry.get("Size", ""), entry.get("ETag", "").strip('"')
        if etag.startswith("W/"):
            etag = ""  # it does not mean equal bytes
        if not _SIZE.fullmatch(size) or not (etag == "" or _ETAG.fullmatch(etag)):
            raise NotAListing("it lists a file whose size or ETag makes no sense")
        files[name] = Listed(int(size), etag)
    if found.texts.get("IsTruncated") != "true":
        return Page(files, "")
    token = found.texts.get("NextContinuationToken", "")
    if not 0 < len(token) <= MAX_TOKEN_CHARACTERS:
        raise NotAListing("it does not say where its listing goes on")
    return Page(files, token)


class _Wanted:
    """Takes the texts that are wanted from a page. A tree would have a hundred times the page's bytes."""

    def __init__(self) -> None:
        self.root = ""
        self.texts: dict[str, str] = {}
        self.entries: list[dict[str, str]] = []
        self._open: list[str] = []
        self._elements = 0
        self._pieces: list[str] = []

    def doctype(self, *_: object) -> None:
        raise NotAListing("its listing declares a document type, which may hold entities")

    def start(self, tag: str, _: Mapping[str, str]) -> None:
        self._elements += 1
        if len(self._open) >= MAX_DEPTH or self._elements > MAX_ELEMENTS:
            raise NotAListing("its listing has more elements, or deeper ones, than any listing needs")
        name = tag.rpartition("}")[2]
        self.root = self.root or name
        self._open.append(name)
        if self._open[1:] == ["Contents"]:
            self.entries.append({})
        self._pieces.clear()

    def data(self, text: str) -> None:
        self._pieces.append(text)

    def end(self, _: str) -> None:
        match self._open[1:]:
            case [name] if name in _OF_PAGE:
                self.texts[name] = "".join(self._pieces)
            case ["Contents", name] if name in _OF_FILE:
                self.entries[-1][name] = "".join(self._pieces)
        self._open.pop()
        self._pieces.clear()


def _read(body: bytes) -> _Wanted:
    found = _Wanted()
    parser = XMLParser(target=found)  # noqa: S314 - without a document type there are no entities
    try:
        for at in range(0, len(body), _PIECE_BYTES):  # a refusal stops the parser only at the end of a piece
            parser.feed(body[at : at + _PIECE_BYTES])
        parser.close()
    except (ParseError, LookupError, ValueError):  # also an unknown encoding
        raise NotAListing("it does not answer with XML") from None
    return found
