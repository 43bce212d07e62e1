"""Asks servers that nobody trusts: tries again after what passes, and follows a bounded number of redirects."""

import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar
from urllib.parse import urljoin, urlsplit

import httpcore2
import httpx2

from motet.errors import AdapterFetchFailed
from motet_runner.sources.fetch_errors import credentials, forbidden, missing, temporary
from motet_runner.sources.fetch_order import NetworkAccess
from motet_runner.sources.network_guard import NetworkGuard
from motet_runner.sources.proxy import Tunnel

MAX_ATTEMPTS = 5
"""How many attempts in a row may fail without a new byte. Then the fetch fails, and the service fetches again later."""

MAX_PAUSES = 30
"""A server that asks for a wait of at least this many times the first pause is asked by the next fetch. Twice as long
counts as a stall."""

MAX_REDIRECTS = 5

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


class WebRequests:
    """Requests to one server, and to those to which it redirects. Only that server gets `authorization`."""

    def __init__(
        self,
        name: str,
        client: httpx2.Client,
        authorization: Mapping[str, str],
        pause: float = 0.5,
        *,
        on_checked: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`name`: of the source, for messages. `pause`: seconds before the second attempt. The time doubles with each
        further attempt. `on_checked`: see `Opening`."""
        self.name = name
        self._client = client
        self._authorization = authorization
        self._pause = pause
        self._on_checked = on_checked

    def _patiently(self, once: Callable[[], Got], came: Callable[[], int], what: str) -> Got:
        """Try until it succeeds, or until `MAX_ATTEMPTS` attempts in a row have brought nothing."""
        failures = 0
        while True:
            before = came()
            try:
                return once()
            except Interrupted as interrupted:
                failures = 1 if came() > before else failures + 1
                if failures >= MAX_ATTEMPTS or interrupted.after >= MAX_PAUSES * self._pause:
                    raise temporary(f"Motet cannot fetch {what}: {interrupted.why}.", after=interrupted.after) from None
                time.sleep(max(interrupted.after, self._pause * 2 ** (failures - 1)) * random.uniform(0.5, 1.0))  # noqa: S311

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
        home = origin(url)
        for _ in range(MAX_REDIRECTS + 1):
            own = self._own_headers(url) if origin(url) == home else {}
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

    def _body(self, response: httpx2.Response, at_most: int) -> bytes:
        body = bytearray()
        for chunk in response.iter_raw():
            self._on_checked(len(chunk))
            body += chunk
            if len(body) >= at_most:
                break
        return bytes(body[:at_most])


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


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, and so on"""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def explain(error: httpx2.HTTPError) -> str:
    """What happened, without any URL: the URL of a redirect may contain a signature."""
    if isinstance(error, httpx2.ProxyError):
        return str(error)  # this text is from `proxy.py`
    for cause in causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"its certificate is not trusted ({cause.verify_message}). The platform can name more authorities in "
                "MOTET_RUNNER_FETCH_CA_FILE"
            )
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower()
    if isinstance(error, httpx2.TimeoutException):
        return "the server sent nothing for too long"
    return "the connection broke"


def _as_failure(error: httpx2.HTTPError, url: str) -> Exception:
    why = explain(error)
    if "not trusted" in why:
        return missing(f"{url}: {why}.")
    return Interrupted(why)


def check_plain(response: httpx2.Response, what: str) -> None:
    codings = response.headers.get("content-encoding", "").lower().split(",")
    if {coding.strip() for coding in codings} - _PLAIN:
        raise forbidden(f"{what} is sent compressed, although Motet asked for plain data.")


def retry_after(response: httpx2.Response) -> float:
    return float(min(60, number(response.headers.get("retry-after", "")) or 0))


def number(text: str) -> int | None:
    """The number in a header. None for any other text, and for a number longer than any size or time."""
    return int(text) if len(text) <= 18 and text.isascii() and text.isdigit() else None


def origin(url: str) -> tuple[str, str | None, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
