"""`motet chat`: a conversation with a model, over the same HTTP API that all clients use."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import typer

from motet.errors import SetupError
from motet.service_main import read
from motet_cli.printer import visible
from motet_cli.readiness import read_status
from motet_cli.settings import Settings
from motet_operator.local.state_directory import StateDirectory

HELP = """/model NAME  talk to another model      /models  list the models
/clear       forget the conversation    /quit    end (or Ctrl-D)"""

NO_GATEWAY = "Is a gateway of Motet at this URL? Name one with --url."

CONNECT_SECONDS = 5.0
READ_TIMEOUT_SECONDS = 120.0


class GatewayRefused(Exception):
    """The gateway refused the request. The message is the gateway's."""

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


@dataclass
class Conversation:
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        limits = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        given = {name: value for name, value in limits.items() if value is not None}
        return {"model": self.model, "messages": self.messages, "stream": True, **given}


def chat(data_dir: Path, *, url: str | None, message: str | None, conversation: Conversation) -> int:
    with client_of(url or url_of(data_dir)) as client:
        try:
            conversation.model = conversation.model or _first_model(client)
            if message is not None:
                _send(client, conversation, message)
                return 0
            return _converse(client, conversation)
        except GatewayRefused as refusal:
            typer.secho(str(refusal), fg="red", err=True)
            return 1


@contextmanager
def client_of(url: str) -> Iterator[httpx.Client]:
    """Asks the gateway at this URL. SetupError if it is none, or if nobody answers there."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        _check_address(httpx.URL(base))
    except (httpx.InvalidURL, ValueError) as error:
        raise SetupError(f"--url {base!r} is not a URL ({error}). Write it as http://HOST:PORT.") from error
    timeout = httpx.Timeout(READ_TIMEOUT_SECONDS, connect=CONNECT_SECONDS)
    try:
        with httpx.Client(base_url=base, timeout=timeout, trust_env=False, headers=credential()) as client:
            yield client
    except httpx.HTTPError as error:
        raise SetupError(f"no answer from {base} ({error}). Is Motet running? See `motet status`.") from error


def _check_address(url: httpx.URL) -> None:
    """Raises ValueError for what no socket takes."""
    url.raw_host.decode().encode("idna")
    if not 0 <= (url.port or 0) < 1 << 16:
        raise ValueError("a port is at most 65535")


def credential() -> dict[str, str]:
    key = read(Settings).api_key.strip()
    if not key:
        return {}
    if not key.isascii() or not key.isprintable() or " " in key:
        raise SetupError("the value of MOTET_API_KEY is not a key: a key has only ASCII characters and no spaces.")
    return {"authorization": f"Bearer {key}"}


def url_of(data_dir: Path) -> str:
    layout = StateDirectory.of(data_dir)
    url = read_status(layout).get("url")
    if not isinstance(url, str) or not url:
        raise SetupError(
            f"Motet is not running (state directory {layout.data}). Start it with `motet up`, or name its --data-dir."
        )
    return url


def _converse(client: httpx.Client, conversation: Conversation) -> int:
    """Until the end of the input. A pipe's exit status is 1 if a request was refused."""
    interactive = sys.stdin.isatty()
    if interactive:
        typer.secho(f"Talking to {visible(conversation.model)}. Type /help for the commands.", dim=True)
        _enable_line_editing()
    refused = False
    while True:
        try:
            line = _next_line(interactive=interactive)
        except EOFError:
            if interactive:
                typer.echo()
            break
        except KeyboardInterrupt:
            typer.echo()
            continue
        if not line:
            continue
        try:
            if not line.startswith("/"):
                _send(client, conversation, line)
            elif _command(client, conversation, line):
                break
        except GatewayRefused as refusal:
            typer.secho(str(refusal), fg="red", err=True)
            refused = True
        except KeyboardInterrupt:
            typer.echo(" …")  # the connection is closed, so the gateway ends the answer, too
    return 1 if refused and not interactive else 0


def _next_line(*, interactive: bool) -> str:
    """Without the spaces around it. Raises EOFError."""
    if interactive:
        return input("> ").strip()
    if line := sys.stdin.readline():
        return line.strip()
    raise EOFError


def _command(client: httpx.Client, conversation: Conversation, line: str) -> bool:
    """Carry out a command such as /quit. Returns whether the conversation is over."""
    word, _, rest = line.partition(" ")
    match word:
        case "/quit" | "/exit":
            return True
        case "/clear":
            conversation.messages.clear()
        case "/models":
            typer.echo("\n".join(visible(model["id"]) for model in _models(client)))
        case "/model" if rest.strip():
            conversation.model = rest.strip()
            conversation.messages.clear()  # the new model should not continue from answers of the old one
        case _:
            typer.echo(HELP)
    return False


def _send(client: httpx.Client, conversation: Conversation, text: str) -> None:
    if not _is_utf8(conversation.model + text):
        raise GatewayRefused("the message, or the model's name, is not UTF-8 and was not sent. Write it in UTF-8.")
    conversation.messages.append({"role": "user", "content": text})
    answer = ""
    try:
        for piece in _answer(client, conversation.body()):
            answer += piece
            typer.echo(piece, nl=False)
        typer.echo()
    except (httpx.HTTPError, GatewayRefused):
        if answer:
            typer.echo()  # so that the error message begins on a new line
        raise
    finally:
        if answer:
            conversation.messages.append({"role": "assistant", "content": answer})
        else:
            conversation.messages.pop()


def _is_utf8(text: str) -> bool:
    """Arguments and lines of a pipe need not be."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _answer(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            response.read()
            raise GatewayRefused(message_of(response))
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue  # a comment, which keeps the connection open
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            with _of_a_gateway():
                event = json.loads(data)
                if "error" in event:
                    raise GatewayRefused(event["error"].get("message", "the stream ended with an error"))
                pieces = [choice["delta"].get("content") or "" for choice in event["choices"]]
            yield from pieces
    raise GatewayRefused(f"the answer ended without [DONE]. {NO_GATEWAY}")


def _models(client: httpx.Client) -> list[dict[str, Any]]:
    response = client.get("/v1/models")
    if response.status_code != httpx.codes.OK:
        raise GatewayRefused(message_of(response))
    with _of_a_gateway():
        models: list[dict[str, Any]] = response.json()["data"]
        return [{"id": str(model["id"]), "state": model.get("state")} for model in models]


def _first_model(client: httpx.Client) -> str:
    models = _models(client)
    if not models:
        raise GatewayRefused("the gateway has no models yet. See `motet status`.")
    answering = [model for model in models if model.get("state") != "failed"] or models
    return str(answering[0]["id"])


@contextmanager
def _of_a_gateway() -> Iterator[None]:
    """Read what a gateway sends. Anybody may answer at the URL."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise GatewayRefused(f"the answer cannot be read. {NO_GATEWAY}") from error


def message_of(response: httpx.Response) -> str:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered with HTTP status {response.status_code}"
    asks = response.status_code == httpx.codes.UNAUTHORIZED
    return f"{message} `motet` takes the key from MOTET_API_KEY." if asks else message


def _enable_line_editing() -> None:
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() its history and arrow keys
