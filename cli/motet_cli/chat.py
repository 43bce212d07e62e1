"""`motet chat`: a conversation with a model, over the same HTTP API that all clients use."""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import typer

from motet_cli.gateway_client import NAME_ONE, GatewayRefused, client_of, is_utf8, message_of, of_a_gateway
from motet_cli.printer import visible

HELP = """/model NAME  talk to another model      /models  list the models
/clear       forget the conversation    /quit    end (or Ctrl-D)"""


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
    with client_of(data_dir, url) as client:
        try:
            conversation.model = conversation.model or _first_model(client)
            if message is not None:
                _send(client, conversation, message)
                return 0
            return _converse(client, conversation)
        except GatewayRefused as refusal:
            typer.secho(str(refusal), fg="red", err=True)
            return 1


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
    if not is_utf8(conversation.model + text):
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
            with of_a_gateway(GatewayRefused):
                event = json.loads(data)
                if "error" in event:
                    raise GatewayRefused(event["error"].get("message", "the stream ended with an error"))
                piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                piece.encode()  # what JSON writes as a half of a character is none
            yield piece
    raise GatewayRefused(f"the answer ended without [DONE]. {NAME_ONE}")


def _models(client: httpx.Client) -> list[dict[str, Any]]:
    response = client.get("/v1/models")
    if response.status_code != httpx.codes.OK:
        raise GatewayRefused(message_of(response))
    with of_a_gateway(GatewayRefused):
        models: list[dict[str, Any]] = response.json()["data"]
        return [{"id": str(model["id"]), "state": model.get("state")} for model in models]


def _first_model(client: httpx.Client) -> str:
    models = _models(client)
    if not models:
        raise GatewayRefused("the gateway has no models yet. See `motet status`.")
    answering = [model for model in models if model.get("state") != "failed"] or models
    return str(answering[0]["id"])


def _enable_line_editing() -> None:
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() its history and arrow keys
