"""Asks a store or a registry: sends bodies from files, reads bounded answers, and tries again after what passes."""

import random
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import httpx2

from motet.clock import monotonic
from motet.errors import SetupError
from motet_cli.upload.blobs import Blob
from motet_runner.sources.web_requests import Interrupted, causes, explain, number

MAX_ATTEMPTS = 5
MAX_PAUSE_SECONDS = 60.0
"""The longest pause before another attempt, also if the server asks for a longer one."""

MAX_ANSWER_BYTES = 256 << 10
MAX_ANSWER_SECONDS = 60.0
"""An answer that takes longer counts as a broken connection."""

SILENCE_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 0.5

NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
"""How OpenSSL calls the answer of a server that does not speak TLS."""

Got = TypeVar("Got")


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: httpx2.Headers
    body: bytes
    """Its first MAX_ANSWER_BYTES"""

    @property
    def retry_after(self) -> float:
        return float(number(self.headers.get("retry-after", "")) or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A store or a registry, for messages."""

    name: str
    address_from: str
    """Where its host is written, such as an option."""
    ca_file: str = ""
    ca_variable: str = "SSL_CERT_FILE"
    """The variable that names a file with authorities"""


class Exchange:
    """Takes proxies from the environment, as other tools do."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        try:
            trust = ssl.create_default_context(cafile=peer.ca_file or None)
        except OSError as error:
            raise SetupError(
                f"{peer.ca_variable}: {peer.ca_file} is no file of authorities in PEM ({error}). Correct it."
            ) from error
        if peer.ca_file:
            trust.load_default_certs()
        self._client = httpx2.Client(
            verify=trust,
            timeout=SILENCE_SECONDS,
            follow_redirects=False,
            headers={"user-agent": "motet", "accept-encoding": "identity"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def patiently(self, what: str, once: Callable[[], Got]) -> Got:
        """Up to MAX_ATTEMPTS times, as long as it raises Interrupted."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                return once()
            except Interrupted as interrupted:
                if attempt == MAX_ATTEMPTS - 1:
                    raise SetupError(
                        f"{self._peer.name}: {what} could not be sent in {MAX_ATTEMPTS} attempts: "
                        f"{interrupted.why}. Push again later: what has arrived is not sent again."
                    ) from None
                pause = max(interrupted.after, FIRST_PAUSE_SECONDS * 2**attempt)
                time.sleep(min(pause, MAX_PAUSE_SECONDS) * random.uniform(0.5, 1.0))  # noqa: S311
        raise AssertionError

    def send(self, method: str, url: str, headers: Mapping[str, str], blob: Blob | None = None) -> Answer:
        """Raises Interrupted, and SetupError for what another attempt would not mend."""
        length = {"content-length": str(blob.size)} if blob is not None else {}
        try:
            request = self._client.build_request(
                method, url, headers={**headers, **length}, content=blob.chunks() if blob is not None else None
            )
            response = self._client.send(request, stream=True)
            try:
                return Answer(response.status_code, response.headers, _body(response))
            finally:
                response.close()
        except httpx2.HTTPError as error:
            raise self._failure(error, httpx2.URL(url).host) from None
        except (httpx2.InvalidURL, ValueError):
            raise SetupError(
                f"{self._peer.name} leads to something that is not a URL. Correct {self._peer.address_from}."
            ) from None

    def _failure(self, error: httpx2.HTTPError, host: str) -> Exception:
        name, address_from = self._peer.name, self._peer.address_from
        for cause in causes(error):
            if isinstance(cause, ssl.SSLCertVerificationError):
                return SetupError(
                    f"{name}: the certificate of {host} is not trusted ({cause.verify_message}). Name a file with its "
                    f"authority in {self._peer.ca_variable}."
                )
            if isinstance(cause, ssl.SSLError) and cause.reason in NO_TLS:
                return SetupError(f"{name}: {host} does not speak TLS. Correct {address_from}.")
            if isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN:
                return SetupError(f"{name}: there is no host {host}. Correct {address_from}.")
        if isinstance(error, httpx2.LocalProtocolError):  # its text may have a credential
            return SetupError(
                f"{name}: a request to {host} would be no valid HTTP. Correct {address_from} and the credentials."
            )
        return Interrupted(explain(error))


def _body(response: httpx2.Response) -> bytes:
    body, started = bytearray(), monotonic()
    for chunk in response.iter_raw():
        body += chunk
        if len(body) >= MAX_ANSWER_BYTES:
            break
        if monotonic() - started > MAX_ANSWER_SECONDS:
            raise Interrupted("the server does not finish its answer")
    return bytes(body[:MAX_ANSWER_BYTES])
