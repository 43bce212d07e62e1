"""Decides again what a recorded policy has decided (`motet.event_record`), and compares."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import orjson
from pydantic import TypeAdapter, ValidationError

from motet.errors import SetupError
from motet.event_record import RECORD_FORM, digest_of
from motet_scheduler.policy import events as scheduler_events
from motet_scheduler.policy.catalog import SavedCatalog
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import SchedulerConfig
from motet_supervisor.policy import events as supervisor_events
from motet_supervisor.policy.supervisor import Supervisor
from motet_supervisor.policy.values import SupervisorConfig

MAX_LINE_BYTES = 64 << 20
"""A catalog of ten thousand adapters has a few megabytes."""

Handle = Callable[[Any, float], list[Any]]
Kinds = dict[str, type]
"""Of events, by their names."""


@dataclass(slots=True)
class Replayed:
    events: int = 0
    begun: int = 0
    """How often the policy began anew."""
    difference: str = ""
    """The first decision that is another one now, with its line; empty if all are the same."""


def replay(file: Path) -> Replayed:
    """Up to the first difference. Raises SetupError for a file that is no record."""
    found = Replayed()
    handle: Handle | None = None
    kinds: Kinds = {}
    for number, line in _lines(file):
        try:
            if "policy" in line:
                _check_form(line, file, number)
                handle, kinds = _begin(line)
                found.begun += 1
                continue
            if handle is None:
                raise ValueError("a record begins with what its policy was made from")
            event, at, then = _adapter(kinds[line["event"]]), float(line["at"]), line["decided"]
            now = _decided(handle, event.validate_python(line["of"]), at)
        except (ValueError, TypeError, KeyError, ValidationError) as error:
            raise SetupError(f"{file}, line {number}: it is no line of a record ({error}).") from error
        found.events += 1
        if now != then:
            found.difference = f"line {number}: {line['event']} at {at:.3f} s leads to other decisions"
            return found
    return found


def _decided(handle: Handle, event: Any, at: float) -> str | None:
    """None: it failed."""
    try:
        return digest_of(handle(event, at))
    except Exception:
        return None


def _check_form(head: dict[str, Any], file: Path, number: int) -> None:
    form, motet = head.get("form", 1), head.get("motet")
    if form != RECORD_FORM:
        by = f"motet {motet}" if isinstance(motet, str) and len(motet) < 40 else "the motet that recorded it"
        raise SetupError(
            f"{file}, line {number}: this record has form {str(form)[:40]}, and this motet replays form {RECORD_FORM}. "
            f"Replay it with {by}, or record again."
        )


def _begin(line: dict[str, Any]) -> tuple[Handle, Kinds]:
    match line["policy"]:
        case "scheduler":
            scheduler = Scheduler(
                _adapter(SchedulerConfig).validate_python(line["config"]),
                now=float(line["began"]),
                saved=_adapter(SavedCatalog).validate_python(line["saved"]) if line["saved"] is not None else None,
                first_order=int(line["first_order"]),
            )
            return scheduler.handle, _kinds(scheduler_events.Event)
        case "supervisor":
            supervisor = Supervisor(_adapter(SupervisorConfig).validate_python(line["config"]))
            return supervisor.handle, _kinds(supervisor_events.Event)
        case other:
            raise ValueError(f"no policy has the name {other!r}")


def _kinds(events: Any) -> Kinds:
    return {kind.__name__: kind for kind in get_args(events)}


@lru_cache(maxsize=128)
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """A process that records, or was killed while it did, leaves a part of a line: the last one of the file, or the
    last one before the next process began."""
    number = part = 0
    try:
        with file.open("rb") as opened:
            while line := opened.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise SetupError(f"{file}, line {number}: it is longer than {MAX_LINE_BYTES >> 20} MiB.")
                found = _object(line)
                if part and (found is None or "policy" not in found):
                    break
                part = number if found is None else 0
                if found is not None:
                    yield number, found
                elif not line.endswith(b"\n"):
                    return
    except OSError as error:
        raise SetupError(f"{file}: {error.strerror or error}.") from error
    if part:
        raise SetupError(f"{file}, line {part}: it is no JSON object.")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
