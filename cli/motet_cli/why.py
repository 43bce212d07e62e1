"""`motet why`: what happened to one request, as its gateway and the scheduler know it."""

from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import typer

from motet.errors import NotFound, SetupError
from motet.json_object import json_object
from motet_cli.gateway_client import NAME_ONE, client_of, message_of, of_a_gateway
from motet_cli.printer import Part, Printer, visible

Json = dict[str, Any]
Rows = list[tuple[str, ...]]
"""Of a timeline"""

WIDTH_OF_A_PIPE = 10_000
MIN_SHOWN_SECONDS = 0.0005
"""A shorter time is not worth a number."""

ON_ITS_WAY_SECONDS = 0.1
"""Of a message from the scheduler."""

WAITS = ("waits", "held", "parked")


def why(data_dir: Path, request: str, *, url: str | None, as_json: bool) -> int:
    document = _asked(data_dir, url, request)
    if as_json:
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    else:
        with of_a_gateway():
            said = list(_in_words(document))
        _print(said)
    return 0


def _asked(data_dir: Path, url: str | None, request: str) -> Json:
    with client_of(data_dir, url) as client:
        answer = client.get(f"/motet/requests/{quote(request, safe='', errors='surrogateescape')}")
    if answer.status_code == HTTPStatus.NOT_FOUND:
        raise NotFound(visible(message_of(answer)))
    if answer.status_code != HTTPStatus.OK:
        raise SetupError(visible(message_of(answer)))
    document = json_object(answer.content)
    if "choices" not in document:
        raise SetupError(f"the answer cannot be read. {NAME_ONE}")
    return document


def _print(said: Iterable[Part | Rows]) -> None:
    printer = Printer(width_of_a_pipe=WIDTH_OF_A_PIPE)
    for one in said:
        if isinstance(one, list):
            printer.table(("after", "lasted", "who", "what", "details"), one)
        elif isinstance(one, str):
            printer.line(one)
        else:
            printer.whole_line(one)


def _in_words(document: Json) -> Iterator[Part | Rows]:
    yield _summary(document)
    for half in ("gateway", "scheduler"):
        if why_not := document[half]:
            yield f"The {half}'s half is missing: {visible(why_not)}.", "yellow"
    many = len(document["choices"]) > 1
    for choice in document["choices"]:
        if many:
            yield f"\nRequest {visible(choice['request'])}:"
        lines = sorted([*document["timeline"], *choice["timeline"]], key=lambda line: line["seconds"])
        yield from _sentences(choice, lines)
        yield [_row(line) for line in lines]
    if not document["choices"]:
        yield from _longest_waits(document["timeline"])
        yield [_row(line) for line in document["timeline"]]


def _summary(document: Json) -> str:
    seconds = f"{document['seconds']:.3f} s"
    if document["status"]:
        state = f"ended after {seconds} with status {document['status']}"
    elif document["gateway"]:
        state = (
            f"ended after {seconds}, by the scheduler" if document["ended"] else f"is {seconds} old, by the scheduler"
        )
    else:
        state = f"is under way since {seconds}"
    model = f" to {visible(document['model'])}" if document["model"] else ""
    outside = {"x-request-id": document["http_id"], "trace": document.get("trace")}
    names = ", ".join(f"{what} {visible(name)}" for what, name in outside.items() if name)
    known = f" ({names})" if names else ""
    first = document["first_token_seconds"]
    token = f"; its first token came after {first:.3f} s" if first is not None else ""
    return f"Request {document['id']}{known} of tenant {document['tenant']}{model} {state}{token}."


def _sentences(choice: Json, timeline: Sequence[Json]) -> Iterable[str]:
    if (predicted := choice["predicted"]) is not None:
        real = f"{choice['tokens']} tokens" if choice["tokens"] is not None else "not known yet"
        yield (
            f"Prompt: {choice['prompt_tokens']} tokens. Answer: {real}; predicted {predicted['q50']}, "
            f"in 9 of 10 cases at most {predicted['q90']} (by {predicted['by']}); {choice['max_tokens']} at most."
        )
    if (split := choice["split"]) is not None and (whole := sum(split.values())):
        parts = ", ".join(f"{part} {seconds:.3f} s ({seconds / whole:.0%})" for part, seconds in split.items())
        yield f"Its time: {parts}."
    yield from _longest_waits(timeline)
    if choice["position"]:
        yield f"It waits now, as number {choice['position']}."
    for runner in choice["runners"]:
        yield f"  {visible(runner['runner'])} does not get it: {visible(runner['why'])}"


def _longest_waits(timeline: Sequence[Json]) -> Iterable[str]:
    """What it waited for and how long, the longest first. What the gateway was told counts where no scheduler knows
    it any more."""
    waits = [line for line in timeline if line["event"] in WAITS and line["lasted"] >= MIN_SHOWN_SECONDS]
    known = [line for line in waits if line["by"] == "scheduler"]
    waits = known + [line for line in waits if line["by"] == "gateway" and not _is_in(line, known)]
    for line in sorted(waits, key=lambda line: -line["lasted"]):
        yield f"It waited {line['lasted']:.3f} s: {visible(line['detail'])}."


def _is_in(line: Json, others: Iterable[Json]) -> bool:
    at = line["seconds"] + ON_ITS_WAY_SECONDS
    return any(one["seconds"] <= at <= one["seconds"] + one["lasted"] + ON_ITS_WAY_SECONDS for one in others)


def _row(line: Json) -> tuple[str, ...]:
    lasted = f"{line['lasted']:.3f} s" if line["lasted"] >= MIN_SHOWN_SECONDS else ""
    return (f"{line['seconds']:.3f} s", lasted, visible(line["by"]), visible(line["event"]), visible(line["detail"]))
