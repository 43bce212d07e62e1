"""Records what a policy was told, when, and what it decided: one JSON line an event. `motet replay` reads it.

A policy is pure, so its events and their times are all that its decisions depend on. Of a decision the line has only a
digest. Prompts and answers are not in events, and so not in a record; names of tenants and adapters are, and addresses
of adapters, which may contain a key.

A record begins with its form: what was recorded in another one cannot be decided again here.
"""

import hashlib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic_core import to_json

from motet.line_file import LineFile

Event = TypeVar("Event")
Effect = TypeVar("Effect")

Write = Callable[[bytes], None]

RECORD_FORM = 6
"""Raise it when events, settings or what is saved get another shape, or mean something else. Form 1 did not say so."""


def recorded(
    handle: Callable[[Event, float], list[Effect]], write: Write, policy: str, **begins_with: Any
) -> Callable[[Event, float], list[Effect]]:
    """The same, and each event is recorded. `begins_with`: what the policy was made from."""
    write(_line({"policy": policy, "form": RECORD_FORM, "motet": version("motet"), **begins_with}))

    def recording(event: Event, now: float) -> list[Effect]:
        line = {"at": now, "event": type(event).__name__, "of": event}
        try:
            decided = handle(event, now)
        except Exception:
            write(_line({**line, "decided": None}))
            raise
        write(_line({**line, "decided": digest_of(decided)}))
        return decided

    return recording


def digest_of(decided: Sequence[Any]) -> str:
    """Equal for equal decisions, in any process."""
    text = orjson.dumps([(type(effect).__name__, effect) for effect in decided], default=_plain)
    return hashlib.sha256(text).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Of what orjson does not know: a set, in its order in any process, or a named tuple, by its names."""
    return sorted(value) if isinstance(value, set | frozenset) else value._asdict()


def record_of(path: str) -> Write | None:
    """What a setting asks for: an empty path means no record."""
    return LineFile(Path(path), stopped="event_record_stopped").append if path else None


def _line(of: dict[str, Any]) -> bytes:
    # A number may be infinite, for which orjson would write the same as for nothing.
    return to_json(of, inf_nan_mode="strings") + b"\n"
