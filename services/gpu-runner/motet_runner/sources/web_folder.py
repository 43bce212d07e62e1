"""Fetches the files of a folder on the web: over TLS, up to their limits. Interrupted downloads are continued."""

import os
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urljoin, urlsplit

import httpcore2
import httpx2

from motet.errors import AdapterFetchFailed
from motet_runner.sources.fetch_errors import credentials, forbidden, missing, temporary, too_large
from motet_runner.sources.fetch_order import NetworkAccess
from motet_runner.sources.file_selection import WantedFile, missing_file
from motet_runner.sources.network_guard import NetworkGuard
from motet_runner.sources.proxy import Tunnel
from motet_runner.sources.remote_source import NeedRoom

MAX_ATTEMPTS = 5
"""How many attempts in a row may fail without a new byte. Then the fetch fails, and the service fetches again later."""

MAX_REDIRECTS = 5

ROOM_STEP = 1 << 20
ROOM_SHARE = 16
"""While a file comes whose size the server has not told, there must be room for `ROOM_STEP` more bytes, or for a
sixteenth of what has come, if that is more. Each time the service lists its cache. If there is no room for so much,
room for what has come is enough."""

Got = TypeVar("Got")

_PLAIN = {"", "identity", "aws-chunked"}
"""`aws-chunked`: how the file once came to its object store. Some stores repeat it, and send plain data."""

_REDIRECTS = (301, 302, 303, 307, 308)
PASSING = (408, 425, 429, 500, 502, 503, 504)


def client(access: NetworkAccess, guard: NetworkGuard, *, timeout: float) -> httpx2.Client:
    """An HTTP client that takes nothing from the environment, such as a proxy or a netrc file. It follows redirects
    only if the caller sets that.

    If there is a proxy, `guard` checks the addresses that the proxy is asked for.
    """
    trust = ssl.create_default_context(cafile=access.ca_file or None)
    if access.ca_file:
        trust.load_default_certs()
    transport = httpx2.HTTPTransport(verify=trust, trust_env=False)
    if access.proxy:
        tunnel = Tunnel(access.proxy, None if access.proxy_guards else guard, trust)
        pool = httpcore2.ConnectionPool(ssl_context=trust, network_backend=tunnel)
        transport._pool = pool  # noqa: SLF001 - httpx2 has no public way to set it
    return httpx2.Client(
        transport=transport,
        trust_env=False,
        timeout=timeout,
        max_redirects=MAX_REDIRECTS,
        headers={"user-agent": "motet", "accept-encoding": "identity"},
    )


class WebFolder:
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
    ) -> None:
        """`pause`: seconds before the second attempt. The time doubles with each further attempt."""
        self.url = self.name = url
        self._client = client
        self._authorization = authorization
        self._need = need
        self._pause = pause

    def fetch(self, file: WantedFile, into: Path) -> bool:
        """Fetch one file. False if it does not exist and is not required."""
        path, part, tag = into / file.name, into / f"{file.name}.part", into / f"{file.name}.etag"
        if path.exists():
            path.replace(part)  # an earlier fetch's file: it is fetched again only if it has changed
        try:
            self._patiently(lambda: self._once(file, part, tag), lambda: size_of(part), file.name)
        except FileNotFoundError:
            for left in (part, tag):
                left.unlink(missing_ok=True)
            if file.required:
                raise missing_file(self.name, file.name) from None
            return False
        part.replace(path)
        return True

    def _patiently(self, once: Callable[[], Got], came: Callable[[], int], what: str) -> Got:
        """Try until it succeeds, or until `MAX_ATTEMPTS` attempts in a row have brought nothing."""
        failures = 0
        while True:
            before = came()
            try:
                return once()
            except Interrupted as interrupted:
                failures = 1 if came() > before else failures + 1
                if failures >= MAX_ATTEMPTS:
                    raise temporary(
                        f"Motet cannot fetch {self.name}{what}: {interrupted.why}.", after=interrupted.after
                    ) from None
                time.sleep(max(interrupted.after, self._pause * 2 ** (failures - 1)) * random.uniform(0.5, 1.0))  # noqa: S311

    def _once(self, file: WantedFile, part: Path, tag: Path) -> None:
        have = size_of(part)
        etag = tag.read_text() if tag.exists() else ""
        headers = {"range": f"bytes={have}-", "if-range": etag} if have and etag else {}
        with self._answer(self.url + quote(file.name), headers) as response:
            self._check_status(response, file)
            if response.status_code == 416:
                if not headers:
                    raise Interrupted("the server answers 416, although it was asked for the whole file")
                if response.headers.get("content-range", "").endswith(f"/{have}"):
                    return  # the part was already the whole file
                part.unlink()
                raise Interrupted("the server does not continue the interrupted download")
            start = _start(response, have)
            length = number(response.headers.get("content-length", ""))
            total = start + length if length is not None else None
            if total is not None and total > file.limit:
                raise too_large(f"{self.name}{file.name} has {total} bytes, but Motet fetches at most {file.limit}.")
            check_plain(response, f"{self.name}{file.name}")
            if total is not None:
                self._need({file.name: total})
            if not start:
                part.unlink(missing_ok=True)
                etag = response.headers.get("etag", "")
                tag.write_text("" if etag.startswith("W/") else etag)  # a weak entity tag does not mean equal bytes
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
                    raise too_large(f"{self.name}{file.name} has more than {file.limit} bytes, which is the limit.")
                if total is None and written > room:
                    ahead = (max(ROOM_STEP, written // ROOM_SHARE), ROOM_STEP, 0)
                    most, *others = (min(file.limit, written + one) for one in ahead)
                    room = most - self._need({file.name: most}, [most - one for one in others])
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())

    @contextmanager
    def _answer(self, url: str, headers: Mapping[str, str]) -> Iterator[httpx2.Response]:
        try:
            response = self._follow(url, headers)
        except httpx2.HTTPError as error:
            raise _as_failure(error, self.name) from None
        except (httpx2.InvalidURL, ValueError):
            raise forbidden(f"{self.name} leads to something that is not a URL.") from None
        try:
            yield response
        except httpx2.HTTPError as error:
            raise _as_failure(error, self.name) from None
        finally:
            with suppress(httpx2.HTTPError):
                response.close()

    def _follow(self, url: str, headers: Mapping[str, str]) -> httpx2.Response:
        home = _origin(url)
        for _ in range(MAX_REDIRECTS + 1):
            own = self._own_headers(url) if _origin(url) == home else {}
            request = self._client.build_request("GET", url, headers={**headers, **own})
            response = self._client.send(request, stream=True)
            if response.status_code not in _REDIRECTS:
                return response
            response.close()
            self._check_redirect(response)
            url = urljoin(url, response.headers.get("location", ""))
            if urlsplit(url).scheme != "https":
                raise forbidden(
                    f"{self.name} redirects to {urlsplit(url).scheme}://. Motet follows only https:// redirects."
                )
        raise forbidden(f"{self.name} redirects more than {MAX_REDIRECTS} times, which is the limit.")

    def _own_headers(self, url: str) -> Mapping[str, str]:  # noqa: ARG002 - for sources that derive from this one
        """What the source's own server is told of who asks for a URL."""
        return self._authorization

    def _check_redirect(self, response: httpx2.Response) -> None:
        """For sources whose redirects have a meaning of their own."""

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
                raise missing(f"Motet cannot fetch {self.name}{file.name}: the server answers {status}.")


class Interrupted(Exception):
    """An error after which the next attempt may succeed."""

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.why = why
        self.after = after


def refused(source: str, status: int, *, given: bool) -> AdapterFetchFailed:
    if given:
        return credentials(f"{source} answers {status}: it does not accept the Secret in source.credentialsSecretRef.")
    return credentials(f"{source} answers {status}: it needs a Secret. Name one in source.credentialsSecretRef.")


def explain(error: httpx2.HTTPError) -> str:
    """What happened, without any URL: the URL of a redirect may contain a signature."""
    if isinstance(error, httpx2.ProxyError):
        return str(error)  # this text is from `proxy.py`
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"its certificate is not trusted ({cause.verify_message}). The platform can name more authorities in "
                "MOTET_RUNNER_FETCH_CA_FILE"
            )
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower()
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx2.TimeoutException):
        return "the server sent nothing for too long"
    return "the connection broke"


def _as_failure(error: httpx2.HTTPError, url: str) -> Exception:
    why = explain(error)
    if "not trusted" in why:
        return missing(f"{url}: {why}.")
    return Interrupted(why)


def _start(response: httpx2.Response, have: int) -> int:
    """The position in the file where this answer begins."""
    if response.status_code == 200:
        return 0
    if response.status_code == 206 and response.headers.get("content-range", "").startswith(f"bytes {have}-"):
        return have
    raise Interrupted("the server does not continue the interrupted download")


def check_plain(response: httpx2.Response, what: str) -> None:
    codings = response.headers.get("content-encoding", "").lower().split(",")
    if {coding.strip() for coding in codings} - _PLAIN:
        raise forbidden(f"{what} is sent compressed, although Motet asked for plain data.")


def retry_after(response: httpx2.Response) -> float:
    return float(min(60, number(response.headers.get("retry-after", "")) or 0))


def number(text: str) -> int | None:
    """The number in a header. None for any other text, and for a number longer than any size or time."""
    return int(text) if len(text) <= 18 and text.isascii() and text.isdigit() else None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
