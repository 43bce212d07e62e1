"""What a record has: if its shape changes, so does its form."""

import hashlib
import json
import re
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_type_hints

from motet.event_record import RECORD_FORM
from motet_scheduler.policy import events as scheduler_events
from motet_scheduler.policy.catalog import SavedCatalog
from motet_scheduler.policy.values import SchedulerConfig
from motet_supervisor.policy import events as supervisor_events
from motet_supervisor.policy.values import SupervisorConfig


def test_another_shape_of_what_is_recorded_has_another_form() -> None:
    """If this fails: can a record of before be read, and does it mean the same? If not, raise RECORD_FORM too."""
    recorded_kinds = [*get_args(scheduler_events.Event), *get_args(supervisor_events.Event)]
    kinds = [*recorded_kinds, SchedulerConfig, SavedCatalog, SupervisorConfig]
    assert (RECORD_FORM, digest_of_shape(kinds)) == (6, "9350ec6578186a9a")


def digest_of_shape(kinds: list[Any]) -> str:
    """Of their fields and of all that these consist of."""
    shapes: dict[str, Any] = {}
    while kinds:
        kind = kinds.pop()
        name = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', kind)}"
        if get_args(kind):
            kinds += get_args(kind)
        elif name in shapes:
            continue
        elif hasattr(kind, "__supertype__"):
            kinds.append(kind.__supertype__)
        elif isinstance(kind, type) and issubclass(kind, Enum):
            shapes[name] = [str(one.value) for one in kind]
        elif is_dataclass(kind) or hasattr(kind, "_fields"):
            hints = get_type_hints(kind)
            names = [one.name for one in fields(kind)] if is_dataclass(kind) else list(kind._fields)
            shapes[name] = [f"{one}: {_named(hints[one])}" for one in names]
            kinds += [hints[one] for one in names]
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16]


def _named(hint: Any) -> str:
    """As each version of Python writes it."""
    return re.sub(r"typing.Optional\[([^]]*)]", r"\1 | None", str(hint))
