"""A client of the gateway, for the commands that ask one: at the URL of --url, or at that of the local stack."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx

from motet.errors import SetupError
from motet.read_settings import read
from motet_cli.printer import visible
from motet_cli.readiness import read_status
from motet_cli.settings import Settings
from motet_operator.local.state_directory import StateDirectory

NO_GATEWAY = "Is a gateway of Motet at this URL?"
NAME_ONE = f"{NO_GATEWAY} Name one with --url."

_PASSWORD = re.compile(r"//[^/?#]*@")

CONNECT_SECONDS = 5.0
READ_TIMEOUT_SECONDS = 120.0


class GatewayRefused(Exception):
    """The gateway refused the request. The message is the gateway's."""

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


@contextmanager
def client_of(data_dir: Path, url: str | None = None) -> Iterator[httpx.Client]:
    """Asks the gateway at this URL; without one, that of the local stack. SetupError if it is no URL, or if nobody
    answers there."""
    base = (url or _url_of(data_dir)).rstrip("/").removesuffix("/v1")
    shown = _PASSWORD.sub("//", base)
    try:
        _check_address(httpx.URL(base))
    except (httpx.InvalidURL, ValueError) as error:
        where, fix = f"--url {shown!r}", "Write it as http://HOST:PORT."
        if not url:
            where, fix = f"{shown!r} in {StateDirectory.of(data_dir).status}", "Start Motet again."
        raise SetupError(f"{where} is not a URL ({error}). {fix}") from error
    timeout = httpx.Timeout(READ_TIMEOUT_SECONDS, connect=CONNECT_SECONDS)
    try:
        with httpx.Client(base_url=base, timeout=timeout, trust_env=False, headers=_credential()) as client:
            yield client
    except httpx.HTTPError as error:
        raise SetupError(f"no answer from {shown} ({error}). Is Motet running? See `motet status`.") from error


def _check_address(url: httpx.URL) -> None:
    """Raises ValueError for what no socket takes."""
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError("it does not begin with http://HOST")
    url.raw_host.decode().encode("idna")
    if not 0 <= (url.port or 0) < 1 << 16:
        raise ValueError("a port is at most 65535")


def _credential() -> dict[str, str]:
    key = read(Settings).api_key.strip()
    if not key:
        return {}
    if not key.isascii() or not key.isprintable() or " " in key:
        raise SetupError("the value of MOTET_API_KEY is not a key: a key has only ASCII characters and no spaces.")
    return {"authorization": f"Bearer {key}"}


def _url_of(data_dir: Path) -> str:
    layout = StateDirectory.of(data_dir)
    url = read_status(layout).get("url")
    if not isinstance(url, str) or not url:
        raise SetupError(
            f"Motet is not running (state directory {layout.data}). Start it with `motet up`, or name its --data-dir."
        )
    return url


@contextmanager
def of_a_gateway(error: type[Exception] = SetupError, *, hint: str = NAME_ONE) -> Iterator[None]:
    """Read what a gateway sends: anybody may answer at the URL. Print nothing within: a terminal has errors of its
    own."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as cause:
        raise error(f"the answer cannot be read. {hint}") from cause


def message_of(response: httpx.Response) -> str:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered with HTTP status {response.status_code}"
    asks = response.status_code == httpx.codes.UNAUTHORIZED
    return f"{message} `motet` takes the key from MOTET_API_KEY." if asks else message


def is_utf8(text: str) -> bool:
    """Arguments and lines of a pipe need not be."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
