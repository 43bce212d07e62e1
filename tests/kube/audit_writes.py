"""What writes have changed, from the audit log: a test that finds an unexpected write shows its content."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from testbed.cluster.cluster import Cluster

Entry = dict[str, Any]


def quiet(cluster: Cluster, whose: str, *, quiet_s: float = 5, within_s: float = 60) -> None:
    """Returns once these users have written nothing for a while: the consequences of earlier changes are done."""
    deadline, seen, since = time.monotonic() + within_s, len(cluster.audit()), time.monotonic()
    while time.monotonic() - since < quiet_s:
        time.sleep(0.5)
        entries = cluster.audit()
        if latest := list(writes_of(entries[seen:], whose)):
            assert time.monotonic() < deadline, f"still writing:\n{told(latest, entries[:seen])}"
            since = time.monotonic()
        seen = len(entries)


def writes_of(entries: Iterable[Entry], whose: str) -> Iterator[Entry]:
    """The writes of users whose names begin with `whose`, without renewals of Leases."""
    for entry in entries:
        reads = entry["verb"] in ("get", "list", "watch")
        if entry["user"].get("username", "").startswith(whose) and not reads and "/leases/" not in entry["requestURI"]:
            yield entry


def told(writes: Sequence[Entry], before: Iterable[Entry]) -> str:
    """Each write and how it differs from the write before it to the same object, if the log has their bodies."""
    bodies = {entry["requestURI"]: entry.get("requestObject") for entry in before}
    lines = []
    for entry in writes:
        uri, body = entry["requestURI"], entry.get("requestObject")
        lines.append(f"{entry['requestReceivedTimestamp']} {entry['user']['username']} {entry['verb']} {uri}")
        lines += [f"    {line}" for line in _differences(bodies.get(uri), body)]
        bodies[uri] = body
    return "\n".join(lines)


def _differences(one: object, other: object, where: str = "") -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from _differences(one.get(key), other.get(key), f"{where}.{key}".removeprefix("."))
    elif isinstance(one, list) and isinstance(other, list):
        yield from _differences(_by_type(one), _by_type(other), where)
    elif one != other:
        yield f"{where}: {one!r} -> {other!r}"


def _by_type(items: list[Any]) -> dict[str, Any]:
    """Conditions by their type, other items by their position."""
    return {
        str(item["type"]) if isinstance(item, dict) and "type" in item else str(place): item
        for place, item in enumerate(items)
    }
