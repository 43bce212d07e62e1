"""The API server's objects, from watches, lists, and the answers to our own writes.

Late and repeated news do no harm: the newer of two versions stays, and an older list does not bring a deleted object
back. Only if the store is restored to an earlier state does this not hold (`rewind`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from motet.clock import Clock, monotonic
from motet_operator.cluster.kinds import ADAPTERS, NAMESPACES, PODS, WATCHED, Kind, Object, key_of, uid_of, version_of

ObjectKey = tuple[str, str]
"""Namespace and name."""

Snapshot = Mapping[Kind, Mapping[ObjectKey, Object]]

TOMBSTONE_SECONDS = 900.0
"""Longer than any list takes."""


@dataclass(frozen=True, slots=True)
class CacheRepairs:
    """What a list corrected because the watch had missed it."""

    added: int = 0
    changed: int = 0
    removed: int = 0

    @property
    def any(self) -> bool:
        return bool(self.added or self.changed or self.removed)


@dataclass(frozen=True, slots=True)
class _Tombstone:
    version: int
    """Versions up to this one are from before the deletion."""

    created_at: float


class NormalizedWrites:
    """What the server stored instead of what we wrote, if they differ: it prunes, defaults or normalises fields.
    Writing the same again would change nothing."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[object, object]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, each: tuple[str, object, object]) -> bool:
        uid, wanted, found = each
        return self._answers.get(uid) == (wanted, found)

    def note(self, uid: str, wanted: object, found: object) -> None:
        if wanted == found:
            self._answers.pop(uid, None)
        else:
            self._answers[uid] = (wanted, found)

    def forget(self, uid: str) -> None:
        self._answers.pop(uid, None)


class Cache:
    def __init__(self, changed: Callable[[Kind], None] = lambda _: None, clock: Clock = monotonic) -> None:
        self._objects: dict[Kind, dict[ObjectKey, Object]] = {kind: {} for kind in WATCHED}
        self._tombstones: dict[Kind, dict[str, _Tombstone]] = {kind: {} for kind in WATCHED}
        self._changed = changed
        self._clock = clock
        self.normalized = NormalizedWrites()

    def get(self, kind: Kind, key: ObjectKey) -> Object | None:
        return self._objects[kind].get(key)

    def count(self, kind: Kind, namespace: str = "") -> int:
        return sum(not namespace or key[0] == namespace for key in self._objects[kind])

    def snapshot(self) -> Snapshot:
        """All cached objects. They are never changed in place, so that another thread may read them."""
        return {kind: dict(objects) for kind, objects in self._objects.items()}

    def put(self, kind: Kind, it: Object) -> bool:
        """False if the object is not newer than the cached one."""
        key, uid = key_of(it), uid_of(it)
        before = self._objects[kind].get(key)
        tombstone = self._tombstones[kind].get(uid)
        if tombstone is not None and tombstone.version >= version_of(it):
            return False
        if before is not None and version_of(before) >= version_of(it):
            return False
        if before is not None and uid_of(before) != uid:
            self._add_tombstone(kind, before, version_of(it))
        self._objects[kind][key] = _without_unread_fields(kind, it)
        self._changed(kind)
        return True

    def remove(self, kind: Kind, it: Object, version: int = 0) -> bool:
        """The object is gone as of `version` or its own. It may come back if it only lost our label."""
        key, version = key_of(it), version or version_of(it)
        before = self._objects[kind].get(key)
        if before is not None and uid_of(before) == uid_of(it) and version_of(before) > version:
            return False
        self._add_tombstone(kind, it, version)
        if before is None or uid_of(before) != uid_of(it):
            return False
        del self._objects[kind][key]
        self._changed(kind)
        return True

    def replace(self, kind: Kind, items: Collection[Object], version: int, namespace: str = "") -> CacheRepairs:
        """Correct the cache by a full list of `namespace`, or of all namespaces, at `version`."""
        added = changed = removed = 0
        for it in items:
            known = key_of(it) in self._objects[kind]
            if self.put(kind, it):
                added += not known
                changed += known
        for it in self.unlisted(kind, items, version, namespace):
            removed += self.remove(kind, it, version)
        self._expire_tombstones(kind)
        return CacheRepairs(added, changed, removed)

    def unlisted(self, kind: Kind, items: Collection[Object], version: int, namespace: str = "") -> list[Object]:
        """Objects that such a list would remove. Objects newer than the list were created after it."""
        listed = {key_of(it) for it in items}
        return [it for key, it in self._within(kind, namespace) if key not in listed and version_of(it) <= version]

    def newest(self, kind: Kind, namespace: str = "") -> int:
        """The highest known version. The store is never older, unless it was restored."""
        return max((version_of(it) for _, it in self._within(kind, namespace)), default=0)

    def contradicted_by(self, kind: Kind, items: Collection[Object], version: int, namespace: str = "") -> bool:
        """Whether such a list has an object in a version older than one that the list must include. A server that only
        lags never answers so: the store was restored."""
        known = {uid_of(it): version_of(it) for _, it in self._within(kind, namespace)}
        known |= {uid: tombstone.version for uid, tombstone in self._tombstones[kind].items()}
        return any(version_of(it) < known.get(uid_of(it), 0) <= version for it in items)

    def rewind(self, kind: Kind, items: Collection[Object], namespace: str = "") -> None:
        """The store was restored to an earlier state: replace the cache by this list."""
        self._tombstones[kind].clear()
        for key, it in list(self._within(kind, namespace)):
            self.normalized.forget(uid_of(it))
            del self._objects[kind][key]
        self._objects[kind] |= {key_of(it): _without_unread_fields(kind, it) for it in items}
        self._changed(kind)

    def _within(self, kind: Kind, namespace: str) -> Iterable[tuple[ObjectKey, Object]]:
        return ((key, it) for key, it in self._objects[kind].items() if not namespace or key[0] == namespace)

    def _add_tombstone(self, kind: Kind, it: Object, version: int) -> None:
        uid, tombstones = uid_of(it), self._tombstones[kind]
        if (tombstone := tombstones.get(uid)) is None or tombstone.version < version:
            tombstones[uid] = _Tombstone(version, self._clock())
        self.normalized.forget(uid)

    def _expire_tombstones(self, kind: Kind) -> None:
        old = self._clock() - TOMBSTONE_SECONDS
        self._tombstones[kind] = {
            uid: tombstone for uid, tombstone in self._tombstones[kind].items() if tombstone.created_at > old
        }


def _without_unread_fields(kind: Kind, it: Object) -> Object:
    """Drop fields that the operator does not read: a cluster has many pods, each with long managedFields."""
    metadata = it["metadata"]
    if kind in (ADAPTERS, NAMESPACES, PODS) and "managedFields" in metadata:
        it = it | {"metadata": {name: value for name, value in metadata.items() if name != "managedFields"}}
    if kind is PODS and "spec" in it:
        spec = it["spec"]
        probes = [_only(("name", "startupProbe"), one) for one in spec.get("containers") or ()]
        it = it | {"spec": _only(("nodeName",), spec) | {"containers": probes}}
    return it


def _only(names: Iterable[str], it: Object) -> Object:
    return {name: it[name] for name in names if name in it}
