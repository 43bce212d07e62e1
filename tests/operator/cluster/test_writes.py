"""What is written against what the API server answers: with more than was asked for, and at times with less."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest

from motet_operator.cluster.api import ApiRefused
from motet_operator.cluster.cache import Cache
from motet_operator.cluster.kinds import DEPLOYMENTS, PODS, POOLS, Kind, Object
from motet_operator.cluster.writes import (
    DeploymentDeletion,
    NameTaken,
    OwnedObjectWrite,
    OwnerGone,
    PodAnnotationWrite,
    PodDeletion,
)
from tests.operator.cluster.objects import deployment, pod

WANTED: Object = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "demo-1", "namespace": "pools", "labels": {"motet.dev/pool": "demo"}},
    "spec": {"template": {"spec": {"containers": [{"name": "runner", "env": [{"name": "A", "value": ""}]}]}}},
}


OURS = [{"manager": "motet-operator", "operation": "Apply"}]
THEIRS = [{"manager": "kubectl", "operation": "Apply"}, {"manager": "motet-operator", "operation": "Update"}]


class Server:
    """Keeps one Deployment."""

    def __init__(self, *, prunes: bool = False, managers: list[Object] = OURS) -> None:
        self.kept = copy.deepcopy(WANTED)
        self.kept["metadata"] |= {"uid": "u", "resourceVersion": "1", "managedFields": managers}
        self.kept["spec"] |= {"replicas": 1, "progressDeadlineSeconds": 600}
        self._prunes = prunes
        self.applied = 0

    def change(self, **metadata: Any) -> Object:
        newer = {"resourceVersion": str(int(self.kept["metadata"]["resourceVersion"]) + 1)}
        self.kept = self.kept | {"metadata": self.kept["metadata"] | newer | metadata}
        return self.kept

    async def list(self, kind: Kind, namespace: str, *, fields: str, fresh: bool) -> tuple[list[Object], int]:
        assert (kind, namespace, fields, fresh) == (DEPLOYMENTS, "pools", "metadata.name=demo-1", True)
        return [self.kept], 1

    async def apply(self, kind: Kind, document: Object, *, manager: str, force: bool) -> Object:
        assert force
        if document["metadata"]["uid"] != self.kept["metadata"]["uid"]:
            raise ApiRefused("patch", kind, "pools", status=409, message="another uid")
        self.applied += 1
        labels = {**self.kept["metadata"]["labels"], **document["metadata"]["labels"]}
        if self._prunes:
            (container,) = document["spec"]["template"]["spec"]["containers"]
            pruned = {"template": {"spec": {"containers": [{"name": container["name"]}]}}}
            self.kept = self.kept | {"spec": self.kept["spec"] | pruned}
        return self.change(labels=labels)


async def applied(server: Server, cache: Cache) -> bool:
    """Whether a round finds something to write, and writes it."""
    write = OwnedObjectWrite(DEPLOYMENTS, WANTED, {"replicas": 1})
    if needed := write.needed(cache):
        await write.carry_out(server, cache)  # type: ignore[arg-type]
    return needed


async def test_fields_filled_in_by_the_server_cause_no_write() -> None:
    server, cache = Server(), Cache()
    assert [await applied(server, cache) for _ in range(3)] == [True, False, False]
    assert len(cache.normalized) == 0


async def test_pruned_fields_are_not_written_again_until_the_deployment_is_recreated() -> None:
    server, cache = Server(prunes=True), Cache()
    assert [await applied(server, cache) for _ in range(3)] == [True, False, False]
    assert len(cache.normalized) == 1
    cache.remove(DEPLOYMENTS, server.change())
    assert len(cache.normalized) == 0


@pytest.mark.parametrize("prunes", [False, True])
async def test_a_removed_label_is_restored_once(prunes: bool) -> None:
    server, cache = Server(prunes=prunes), Cache()
    await applied(server, cache)
    cache.put(DEPLOYMENTS, server.change(labels={"motet.dev/pool": "another"}))
    assert [await applied(server, cache) for _ in range(3)] == [True, False, False]


async def test_a_deployment_without_the_watched_label_gets_it_back_once() -> None:
    server, cache = Server(), Cache()
    await applied(server, cache)
    cache.remove(DEPLOYMENTS, server.change(labels={}))  # to a watch with a selector it is deleted
    assert [await applied(server, cache) for _ in range(3)] == [True, False, False]
    assert cache.get(DEPLOYMENTS, ("pools", "demo-1")) is not None


@pytest.mark.parametrize("seen", [False, True], ids=["without our label", "with our label"])
async def test_a_foreign_deployment_is_not_changed(seen: bool) -> None:
    server, cache = Server(managers=THEIRS), Cache()
    if seen:
        cache.put(DEPLOYMENTS, server.change(labels={"motet.dev/pool": "another"}))
    with pytest.raises(NameTaken, match="Deployment demo-1"):
        await applied(server, cache)
    assert server.applied == 0


async def test_a_deployment_that_is_gone_meanwhile_is_not_made_again_by_a_change() -> None:
    server, cache = Server(), Cache()
    cache.put(DEPLOYMENTS, server.change(labels={"motet.dev/pool": "another"}))
    server.change(uid="none: it is gone")
    with pytest.raises(ApiRefused, match="another uid"):
        await applied(server, cache)
    assert server.applied == 0


@pytest.mark.parametrize("another", [False, True], ids=["gone", "made again by another replica"])
async def test_a_deployment_that_is_gone_is_written_although_its_watch_never_reports_that(another: bool) -> None:
    """Mutation: the write is refused for as long as the watch is behind, and the pool's status says so."""
    server, cache = Server(), Cache()
    cache.put(DEPLOYMENTS, server.change(labels={"motet.dev/pool": "another"}))

    class Behind:
        stored = [server.change(uid="a later one", labels={"motet.dev/pool": "another"})] if another else []

        async def list(self, *_: Any, **__: Any) -> tuple[list[Object], int]:
            return self.stored, 1

        async def apply(self, kind: Kind, document: Object, *, force: bool, **_: Any) -> Object:
            uid = document["metadata"].get("uid")
            if uid != (self.stored[0]["metadata"]["uid"] if self.stored else None):
                raise ApiRefused("patch", kind, "pools", status=409, message="uid mismatch")
            assert force is another
            return server.change(uid=uid or "new", labels=document["metadata"]["labels"])

    write = OwnedObjectWrite(DEPLOYMENTS, WANTED, {"replicas": 1})
    with pytest.raises(ApiRefused, match="uid mismatch"):
        await write.carry_out(Behind(), cache)  # type: ignore[arg-type]
    assert write.needed(cache)
    await write.carry_out(Behind(), cache)  # type: ignore[arg-type]
    assert not write.needed(cache)


async def test_a_refusal_of_a_deployment_that_is_there_leaves_it_known() -> None:
    server, cache = Server(), Cache()
    cache.put(DEPLOYMENTS, server.change(labels={"motet.dev/pool": "another"}))

    class Refuses(Server):
        async def apply(self, kind: Kind, *_: Any, **__: Any) -> Object:
            raise ApiRefused("patch", kind, "pools", status=409, message="a policy")

    with pytest.raises(ApiRefused, match="a policy"):
        await applied(Refuses(), cache)
    assert cache.get(DEPLOYMENTS, ("pools", "demo-1")) is not None


async def test_an_object_created_meanwhile_is_not_overwritten_by_force() -> None:
    asked: list[tuple[bool, int]] = []

    class Empty:
        async def list(self, kind: Kind, namespace: str, *, fields: str, fresh: bool) -> tuple[list[Object], int]:
            return [], 1

        async def apply(self, kind: Kind, document: Object, *, manager: str, force: bool) -> Object:
            asked.append((force, document["spec"]["replicas"]))
            raise ApiRefused("patch", kind, "pools", status=409, message='conflict with "kubectl"')

    with pytest.raises(ApiRefused):
        await OwnedObjectWrite(DEPLOYMENTS, WANTED, {"replicas": 3}).carry_out(Empty(), Cache())  # type: ignore[arg-type]
    assert asked == [(False, 3)]


@pytest.mark.parametrize(
    ("pools", "made"),
    [
        ([{"uid": "mine"}], True),
        ([], False),
        ([{"uid": "of another life"}], False),
        ([{"uid": "mine", "deletionTimestamp": "2026-01-01T00:00:00Z"}], False),
    ],
    ids=["exists", "gone", "made again", "being deleted"],
)
async def test_nothing_is_made_for_a_pool_that_is_gone(pools: list[Object], made: bool) -> None:
    """Its Deployment has ended with it, and the watch of Deployments was faster than that of pools."""
    asked: list[Kind] = []

    class Stored:
        applied = False

        async def list(self, kind: Kind, namespace: str, *, fields: str, fresh: bool) -> tuple[list[Object], int]:
            asked.append(kind)
            assert fresh
            assert (namespace, fields) == ("pools", "metadata.name=demo" if kind is POOLS else "metadata.name=demo-1")
            return [{"metadata": metadata} for metadata in pools] if kind is POOLS else [], 1

        async def apply(self, kind: Kind, document: Object, **_: Any) -> Object:
            self.applied = True
            return document | {"metadata": document["metadata"] | {"uid": "u", "resourceVersion": "1"}}

    server, owner = Stored(), {"name": "demo", "uid": "mine"}
    owned = WANTED | {"metadata": WANTED["metadata"] | {"ownerReferences": [owner]}}
    with nullcontext() if made else pytest.raises(OwnerGone, match="demo"):
        await OwnedObjectWrite(DEPLOYMENTS, owned).carry_out(server, Cache())  # type: ignore[arg-type]
    assert server.applied == made
    assert asked == [DEPLOYMENTS, POOLS], "in the other order, the pool may go in between"


def test_a_deployment_that_is_being_deleted_is_not_written() -> None:
    cache = Cache()
    cache.put(DEPLOYMENTS, deployment("1", 1) | {"metadata": WANTED["metadata"] | {"deletionTimestamp": "2026-01-01"}})
    assert not OwnedObjectWrite(DEPLOYMENTS, WANTED, {"replicas": 1}).needed(cache)


class Deleting:
    """Notes as what it was asked to delete a pod."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str, version: int) -> None:
        self.asked.append((uid, version))

    async def get(self, kind: Kind, namespace: str, name: str) -> None:
        return None


async def test_a_pod_is_deleted_only_as_it_was_when_that_was_decided() -> None:
    server, cache = Deleting(), Cache()
    cache.put(PODS, pod("one", "1"))
    write = PodDeletion(("pools", "one"), "pools/one", 1, "it hangs")
    assert write.needed(cache)
    await write.carry_out(server, cache)  # type: ignore[arg-type]
    assert server.asked == [("pools/one", 1)]
    assert cache.get(PODS, ("pools", "one")) is None

    newer = pod("one", "1")
    newer["metadata"] |= {"resourceVersion": "2", "uid": "another"}
    cache.put(PODS, newer)
    assert not write.needed(cache)
    assert not PodDeletion(("pools", "one"), "another", 1, "it hangs").needed(cache), "it is well again, perhaps"


def marked(**annotations: str) -> Object:
    return pod("one", "1", annotations=annotations)


def test_an_annotation_write_is_needed_until_the_pod_has_exactly_these_annotations() -> None:
    cache = Cache()
    cache.put(PODS, marked(**{"motet.dev/draining-until": "then", "theirs": "x"}))

    def needed(annotations: dict[str, str]) -> bool:
        return PodAnnotationWrite(("pools", "one"), "pools/one", annotations).needed(cache)

    assert needed({})
    assert needed({"motet.dev/draining-until": "later"})
    assert not needed({"motet.dev/draining-until": "then"})
    assert not PodAnnotationWrite(("pools", "one"), "another", {}).needed(cache)


async def test_an_annotation_that_the_server_keeps_is_not_written_again() -> None:
    cache, stuck = Cache(), marked(**{"motet.dev/draining-until": "then"})
    cache.put(PODS, stuck)

    class Stubborn:
        async def apply(self, kind: Kind, document: Object, *, manager: str) -> Object:
            return stuck | {"metadata": stuck["metadata"] | {"resourceVersion": "2"}}

    write = PodAnnotationWrite(("pools", "one"), "pools/one", {})
    await write.carry_out(Stubborn(), cache)  # type: ignore[arg-type]
    assert not write.needed(cache)


class ServerOfPods:
    """Has one Deployment and its pods."""

    def __init__(self, *pods: Object) -> None:
        self.pods = list(pods)
        self.deleted: list[str] = []

    async def list(self, kind: Kind, namespace: str, *, selector: str, fresh: bool) -> tuple[list[Object], int]:
        assert (kind, namespace, fresh) == (PODS, "pools", True)
        return self.pods, 1

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        self.deleted.append(name)


async def test_a_deployment_is_deleted_once_none_of_its_pods_lives() -> None:
    ended = pod("one", "1") | {"status": {"phase": "Failed", "reason": "Evicted"}}
    for server, deleted in ((ServerOfPods(ended, pod("two", "1")), []), (ServerOfPods(ended), ["demo-1"])):
        cache = Cache()
        cache.put(DEPLOYMENTS, deployment("1", 0))
        await DeploymentDeletion(("pools", "demo-1"), "pools/demo-1", "demo", "1").carry_out(server, cache)  # type: ignore[arg-type]
        assert server.deleted == deleted
        assert (cache.get(DEPLOYMENTS, ("pools", "demo-1")) is None) == bool(deleted)
