"""The writes to the API server: each knows whether it is still needed and how to carry it out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from motet.kube import CONFLICT
from motet_operator.cluster.api import Api, ApiRefused
from motet_operator.cluster.cache import Cache, ObjectKey
from motet_operator.cluster.kinds import (
    DEPLOYMENTS,
    PODS,
    POOL_LABEL,
    POOLS,
    Kind,
    Object,
    key_of,
    uid_of,
    version_of,
)
from motet_operator.cluster.object_parser import REVISION_LABEL, annotations_of, has_finished
from motet_operator.reconcile import Event

OWNED_MANAGER = "motet-operator"
STATUS_MANAGER = "motet-status"
SCALE_MANAGER = "motet-scaler"
DRAIN_MANAGER = "motet-drainer"


class NameTaken(Exception):
    """An object that the operator did not create has the name that the operator needs."""


class OwnerGone(Exception):
    """The pool that would own the object has been deleted, and the watch has not reported that yet."""


@dataclass(frozen=True, slots=True)
class WriteKey:
    what: str
    kind: Kind
    object: ObjectKey

    @property
    def urgent(self) -> bool:
        """Writes for runners come first: users wait for them, and there may be ten thousand statuses."""
        return self.what != "status"

    def __str__(self) -> str:
        return f"{self.what} {self.kind} {'/'.join(self.object)}"


class Write(Protocol):
    @property
    def key(self) -> WriteKey: ...

    def needed(self, cache: Cache) -> bool:
        """Checked again just before the write: the change may already be there."""

    async def carry_out(self, api: Api, cache: Cache) -> None:
        """Raises ApiError, NameTaken or OwnerGone."""


@dataclass(frozen=True, slots=True)
class StatusWrite:
    kind: Kind
    object: ObjectKey
    uid: str
    status: Object
    events: tuple[Event, ...] = ()
    """Posted once the status is written."""

    @property
    def key(self) -> WriteKey:
        return WriteKey("status", self.kind, self.object)

    def needed(self, cache: Cache) -> bool:
        it = cache.get(self.kind, self.object)
        if it is None or uid_of(it) != self.uid:
            return False
        found = it.get("status") or {}
        return found != self.status and (self.uid, self.status, found) not in cache.normalized

    async def carry_out(self, api: Api, cache: Cache) -> None:
        namespace, name = self.object
        document = {
            "apiVersion": self.kind.api_version,
            "kind": self.kind.name,
            "metadata": {"name": name, "namespace": namespace, "uid": self.uid},
            "status": self.status,
        }
        answer = await api.apply(self.kind, document, manager=STATUS_MANAGER, subresource="status")
        cache.normalized.note(self.uid, self.status, answer.get("status") or {})
        cache.put(self.kind, answer)


@dataclass(frozen=True, slots=True)
class OwnedObjectWrite:
    """Create an object that a pool owns, or correct it."""

    kind: Kind
    document: Object
    initial_fields: Object = field(default_factory=dict)
    """Additional `spec` fields for creation only: later another field manager writes them."""

    @property
    def key(self) -> WriteKey:
        return WriteKey(self.kind.name.lower(), self.kind, key_of(self.document))

    def needed(self, cache: Cache) -> bool:
        it = cache.get(self.kind, key_of(self.document))
        if it is None:
            return True
        if "deletionTimestamp" in it["metadata"]:
            return False
        found = wherever_wanted(it, self.document)
        return found != self.document and (uid_of(it), self.document, found) not in cache.normalized

    async def carry_out(self, api: Api, cache: Cache) -> None:
        document, key = self.document, key_of(self.document)
        found = cache.get(self.kind, key)
        if found is None:  # the cache does not have objects without our label
            found = await self._stored(api)
        if found is None:
            await self._check_owner(api)
            document = document | {"spec": document["spec"] | self.initial_fields}
        elif not made_by_us(found):
            raise NameTaken(f"{self.kind.name} {key[1]}")
        else:  # the API server refuses the change if the object is gone meanwhile; with no uid it would create it
            document = document | {"metadata": document["metadata"] | {"uid": uid_of(found)}}
        try:
            # Force only on our own object: another client may be creating one of this name right now.
            answer = await api.apply(self.kind, document, manager=OWNED_MANAGER, force=found is not None)
        except ApiRefused as error:
            if found is not None and error.status == CONFLICT:
                stored = await self._stored(api)
                if stored is None or uid_of(stored) != uid_of(found):
                    cache.remove(self.kind, found)  # the watch has not reported that yet
            raise
        cache.normalized.note(uid_of(answer), self.document, wherever_wanted(answer, self.document))
        cache.put(self.kind, answer)

    async def _stored(self, api: Api) -> Object | None:
        namespace, name = key_of(self.document)
        stored, _ = await api.list(self.kind, namespace, fields=f"metadata.name={name}", fresh=True)
        return next(iter(stored), None)

    async def _check_owner(self, api: Api) -> None:
        """The end of an object may be known before the deletion of its pool, which caused it: they come over different
        watches. Made again, it would run pods until Kubernetes deletes it again."""
        namespace = self.document["metadata"]["namespace"]
        for owner in self.document["metadata"].get("ownerReferences", ()):
            stored, _ = await api.list(POOLS, namespace, fields=f"metadata.name={owner['name']}", fresh=True)
            if not any(uid_of(it) == owner["uid"] and "deletionTimestamp" not in it["metadata"] for it in stored):
                raise OwnerGone(owner["name"])


@dataclass(frozen=True, slots=True)
class ScaleWrite:
    """Set `spec.replicas` under its own field manager, so that no other apply changes it."""

    object: ObjectKey
    uid: str
    replicas: int

    @property
    def key(self) -> WriteKey:
        return WriteKey("scale", DEPLOYMENTS, self.object)

    def needed(self, cache: Cache) -> bool:
        it = cache.get(DEPLOYMENTS, self.object)
        if it is None or uid_of(it) != self.uid or "deletionTimestamp" in it["metadata"]:
            return False
        return it["spec"].get("replicas") != self.replicas or not scaled_by_us(it)

    async def carry_out(self, api: Api, cache: Cache) -> None:
        namespace, name = self.object
        document = {
            "apiVersion": DEPLOYMENTS.api_version,
            "kind": DEPLOYMENTS.name,
            "metadata": {"name": name, "namespace": namespace, "uid": self.uid},
            "spec": {"replicas": self.replicas},
        }
        cache.put(DEPLOYMENTS, await api.apply(DEPLOYMENTS, document, manager=SCALE_MANAGER))


@dataclass(frozen=True, slots=True)
class PodAnnotationWrite:
    """Annotate a leaving pod: until when it drains, and that it leaves now. Removed again from a pod that stays."""

    object: ObjectKey
    uid: str
    annotations: Mapping[str, str] = field(hash=False)

    @property
    def key(self) -> WriteKey:
        return WriteKey("mark", PODS, self.object)

    def needed(self, cache: Cache) -> bool:
        it = cache.get(PODS, self.object)
        if it is None or uid_of(it) != self.uid:
            return False
        found = annotations_of(it)
        return found != self.annotations and (self.uid, self.annotations, found) not in cache.normalized

    async def carry_out(self, api: Api, cache: Cache) -> None:
        namespace, name = self.object
        document = {
            "apiVersion": PODS.api_version,
            "kind": PODS.name,
            "metadata": {"name": name, "namespace": namespace, "uid": self.uid, "annotations": dict(self.annotations)},
        }
        answer = await api.apply(PODS, document, manager=DRAIN_MANAGER)
        cache.normalized.note(self.uid, self.annotations, annotations_of(answer))
        cache.put(PODS, answer)


@dataclass(frozen=True, slots=True)
class PodDeletion:
    """Delete exactly this version of a pod; its Deployment creates another if one is wanted."""

    object: ObjectKey
    uid: str
    version: int
    why: str

    @property
    def key(self) -> WriteKey:
        return WriteKey("delete", PODS, self.object)

    def needed(self, cache: Cache) -> bool:
        it = cache.get(PODS, self.object)
        return it is not None and (uid_of(it), version_of(it)) == (self.uid, self.version)

    async def carry_out(self, api: Api, cache: Cache) -> None:
        namespace, name = self.object
        await api.delete(PODS, namespace, name, uid=self.uid, version=self.version)
        if (now := await api.get(PODS, namespace, name)) is not None:
            cache.put(PODS, now)
        elif (it := cache.get(PODS, self.object)) is not None and uid_of(it) == self.uid:
            cache.remove(PODS, it)


@dataclass(frozen=True, slots=True)
class DeploymentDeletion:
    """Delete the Deployment of an old revision without pods. The API server is asked first: the cache may be behind."""

    object: ObjectKey
    uid: str
    pool: str
    revision: str

    @property
    def key(self) -> WriteKey:
        return WriteKey("delete", DEPLOYMENTS, self.object)

    def needed(self, cache: Cache) -> bool:
        it = cache.get(DEPLOYMENTS, self.object)
        return it is not None and uid_of(it) == self.uid and "deletionTimestamp" not in it["metadata"]

    async def carry_out(self, api: Api, cache: Cache) -> None:
        namespace, name = self.object
        selector = f"{POOL_LABEL}={self.pool},{REVISION_LABEL}={self.revision}"
        found, _ = await api.list(PODS, namespace, selector=selector, fresh=True)
        if pods := [pod for pod in found if not has_finished(pod)]:
            for pod in pods:
                cache.put(PODS, pod)
            return
        it = cache.get(DEPLOYMENTS, self.object)
        await api.delete(DEPLOYMENTS, namespace, name, uid=self.uid)
        if it is not None and uid_of(it) == self.uid:
            cache.remove(DEPLOYMENTS, it)


def made_by_us(it: Object) -> bool:
    return _applied_by(OWNED_MANAGER, it)


def scaled_by_us(deployment: Object) -> bool:
    return _applied_by(SCALE_MANAGER, deployment)


def _applied_by(manager: str, it: Object) -> bool:
    return any(
        entry.get("manager") == manager and entry.get("operation") == "Apply"
        for entry in it["metadata"].get("managedFields") or ()
    )


def covers(found: object, wanted: object) -> bool:
    """Whether all wanted fields have their values; additional fields do not matter."""
    return wherever_wanted(found, wanted) == wanted


def wherever_wanted(found: object, wanted: object) -> object:
    """The found values of all wanted fields; equal to `wanted` if nothing has to be written."""
    if found is None and wanted in ("", [], {}):
        return wanted
    if isinstance(found, dict) and isinstance(wanted, dict):
        return {key: wherever_wanted(found.get(key), value) for key, value in wanted.items()}
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        return [wherever_wanted(one, other) for one, other in zip(found, wanted, strict=True)]
    return found
