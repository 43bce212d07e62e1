"""Fetches the files of a folder on the web: over TLS, up to their limits. Interrupted downloads are continued."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import quote

import httpx2

from motet_runner.sources.fetch_errors import missing, temporary, too_large
from motet_runner.sources.file_selection import WantedFile, missing_file
from motet_runner.sources.remote_source import NeedRoom
from motet_runner.sources.web_requests import (
    PASSING,
    Interrupted,
    WebRequests,
    check_plain,
    number,
    refused,
    retry_after,
)

TAG = ".etag"
"""The end of the name of the file that has the entity tag of another one."""

ROOM_STEP = 1 << 20
ROOM_SHARE = 16
"""While a file comes whose size the server has not told, there must be room for `ROOM_STEP` more bytes, or for a
sixteenth of what has come, if that is more. Each time the service lists its cache. If there is no room for so much,
room for what has come is enough."""


class WebFolder(WebRequests):
    """A folder whose files have URLs. A source with a listing, or with other answers, derives from it."""

    revision = ""
    sizes: Mapping[str, int | None] | None = None

    def __init__(
        self,
        url: str,
        client: httpx2.Client,
        authorization: Mapping[str, str],
        need: NeedRoom,
        pause: float = 0.5,
        *,
        on_checked: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__(url, client, authorization, pause, on_checked=on_checked)
        self.url = url
        self._need = need

    def fetch(self, file: WantedFile, into: Path) -> bool:
        """Fetch one file. False if it does not exist and is not required."""
        path, part, tag = into / file.name, into / f"{file.name}.part", into / f"{file.name}{TAG}"
        if path.exists():
            path.replace(part)  # an earlier fetch's file: it is fetched again only if it has changed
        try:
            self._patiently(lambda: self._once(file, part, tag), lambda: size_of(part), self._named(file))
        except FileNotFoundError:
            for left in (part, tag):
                left.unlink(missing_ok=True)
            if file.required:
                raise missing_file(self.name, file.name) from None
            return False
        part.replace(path)
        return True

    def confirm(self, into: Path) -> None:
        if self.sizes is not None:
            return  # it has a listing, which says what the files are
        for tag in sorted(into.glob(f"*{TAG}")):
            file, etag = WantedFile(tag.name.removesuffix(TAG), 0), tag_in(tag)
            if not (etag and (into / file.name).exists()):  # an earlier revision had it
                continue
            if not self._patiently(partial(self._is_same, file, etag), lambda: 0, self._named(file)):
                raise temporary(
                    f"{self._named(file)} was overwritten while the other files came. Motet fetches the folder again "
                    "automatically. Publish new files in a new folder."
                )

    def _once(self, file: WantedFile, part: Path, tag: Path) -> None:
        have = size_of(part)
        etag = tag_in(tag)
        headers = {"range": f"bytes={have}-", **self._only_if(etag)} if have and etag else {}
        with self._answer(self._url_of(file), headers) as response:
            self._check_status(response, file)
            if response.status_code == 416:
                if not headers:
                    raise Interrupted("the server answers 416, although it was asked for the whole file")
                if response.headers.get("content-range", "").endswith(f"/{have}") and self._is_same(file, etag):
                    return  # the part was already the whole file
                part.unlink()
                raise Interrupted("the server does not continue the interrupted download")
            start = _start(response, have)
            if start and not self._continues(response, etag):
                part.unlink()
                raise Interrupted("the file has changed since its download began")
            total = _total(response, start)
            if total is not None and total > file.limit:
                raise too_large(f"{self._named(file)} has {total} bytes, but Motet fetches at most {file.limit}.")
            check_plain(response, self._named(file))
            if total is not None:
                self._need({file.name: total})
            if not start:
                part.unlink(missing_ok=True)
                tag.write_text(self._tag_of(response, file))
            self._write(response, file, part, start, total)
            if total is not None and size_of(part) != total:
                raise Interrupted(f"the download ended after {size_of(part)} of {total} bytes")

    def _write(self, response: httpx2.Response, file: WantedFile, part: Path, start: int, total: int | None) -> None:
        written, room = start, 0
        with part.open("ab") as out:
            for chunk in response.iter_raw():  # a larger chunk would be lost if the connection breaks
                written += len(chunk)
                if written > file.limit:
                    out.truncate(0)
                    raise too_large(f"{self._named(file)} has more than {file.limit} bytes, which is the limit.")
                if total is None and written > room:
                    ahead = (max(ROOM_STEP, written // ROOM_SHARE), ROOM_STEP, 0)
                    most, *others = (min(file.limit, written + one) for one in ahead)
                    room = most - self._need({file.name: most}, [most - one for one in others])
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())

    def _named(self, file: WantedFile) -> str:
        """The file in messages."""
        return f"{self.name}{file.name}"

    def _url_of(self, file: WantedFile) -> str:
        return self.url + quote(file.name)

    def _tag_of(self, response: httpx2.Response, file: WantedFile) -> str:  # noqa: ARG002 - for other sources
        """What names the bytes that come. Empty: they cannot be continued."""
        etag: str = response.headers.get("etag", "")
        return "" if etag.startswith("W/") else etag  # a weak entity tag does not mean equal bytes

    def _only_if(self, tag: str) -> Mapping[str, str]:
        """The header by which only the bytes of this tag are continued."""
        return {"if-range": tag}

    def _continues(self, response: httpx2.Response, tag: str) -> bool:
        """Whether these are the bytes of this tag: not every server that knows `range` knows `if-range`."""
        return bool(response.headers.get("etag", "") == tag)

    def _is_same(self, file: WantedFile, tag: str) -> bool:
        """Whether the file has this tag now. Answers that there is no more of it name none."""
        with self._answer(self._url_of(file), {"if-none-match": tag}) as response:
            if response.status_code in PASSING:
                raise Interrupted(f"the server answers {response.status_code}", retry_after(response))
            return response.status_code == 304 or self._continues(response, tag)

    def _check_status(self, response: httpx2.Response, file: WantedFile) -> None:
        status = response.status_code
        match status:
            case 200 | 206 | 416:
                return
            case 404 | 410:
                raise FileNotFoundError
            case 403 if not file.required:
                raise FileNotFoundError  # object stores answer 403 for a missing file if the caller may not list files
            case 401 | 403:
                raise refused(self.name, status, given=bool(self._authorization))
            case _ if status in PASSING:
                raise Interrupted(f"the server answers {status}", retry_after(response))
            case _:
                raise missing(f"Motet cannot fetch {self._named(file)}: the server answers {status}.")


def _start(response: httpx2.Response, have: int) -> int:
    """The position in the file where this answer begins."""
    if response.status_code == 200:
        return 0
    if response.status_code == 206 and response.headers.get("content-range", "").startswith(f"bytes {have}-"):
        return have
    raise Interrupted("the server does not continue the interrupted download")


def _total(response: httpx2.Response, start: int) -> int | None:
    """The bytes of the file. None: the server does not say. A part may end before the file does."""
    whole = number(response.headers.get("content-range", "").rpartition("/")[2]) if start else None
    length = number(response.headers.get("content-length", ""))
    return whole if whole is not None or length is None else start + length


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def tag_in(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
