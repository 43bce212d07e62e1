"""Which messages have the whole state of something, so that a newer message replaces an older one."""

from collections.abc import Hashable
from typing import Any

from motet.api.v1 import scheduler_pb2, supervisor_pb2

COALESCED: dict[type[Any], dict[str, tuple[str, ...]]] = {
    scheduler_pb2.ServeUp: {"held": ()},
    scheduler_pb2.ServeDown: {"catalog": (), "position": ("request",)},
    scheduler_pb2.AttachUp: {"report": ()},
    scheduler_pb2.SyncUp: {"snapshot": ()},
    scheduler_pb2.SyncDown: {
        "adapter": ("ref.namespace", "ref.name"),
        "runner": ("runner.instance",),
        "desired": ("pool",),
    },
    supervisor_pb2.WatchUp: {"memory": ()},
    supervisor_pb2.WatchDown: {"overcommit": ("pool",)},
    supervisor_pb2.AdviseDown: {"overcommit": ("pool",)},
}
"""For each message of a stream: which of its members are whole states, and the fields that say of which object.

The set of drains is not one of them: it must be sent before the first snapshot, and a newer one that replaces it would
move to the end of the outbox."""

IN_PLACE: frozenset[str] = frozenset({"adapter", "desired", "runner"})
"""The states that take the place of the older one: `ReportedAll` says that they have all been told before it."""

CHANGES: dict[Hashable, str] = {("catalog",): "catalog_changes", ("report",): "listed"}
"""For the key of a state that is also sent in changes, or goes on in parts: the member that these are."""


def coalescing_key(message: Any) -> Hashable | None:
    """The key of the state in `message`; None if no other message replaces this one."""
    states = COALESCED.get(type(message))
    if states is None or (kind := message.WhichOneof("message")) not in states:
        return None
    return kind, *(_read(getattr(message, kind), path) for path in states[kind])


def _read(message: Any, path: str) -> Any:
    for name in path.split("."):
        message = getattr(message, name)
    return message
