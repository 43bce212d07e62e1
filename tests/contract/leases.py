"""Tests for every client of a Lease, on which an election relies: the fake in memory, and a real API server."""

import copy

import pytest

from motet.kube import CONFLICT, NOT_FOUND, KubeObject, StatusError
from motet.lease import LeaseApi

SECONDS = 10.0


def lease(namespace: str, name: str, *, holder: str = "first", term: int = 1) -> KubeObject:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": namespace, "annotations": {"motet.dev/term": str(term)}},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15, "leaseTransitions": 0},
    }


class LeaseClient:
    """One candidate's client of one Lease."""

    def __init__(self, api: LeaseApi, namespace: str, name: str) -> None:
        self.api, self.namespace, self.name = api, namespace, name
        self._all = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"

    def lease(self, **how) -> KubeObject:
        return lease(self.namespace, self.name, **how)

    async def get(self) -> KubeObject:
        return await self.api.get(f"{self._all}/{self.name}", seconds=SECONDS)

    async def post(self, body: KubeObject) -> KubeObject:
        return await self.api.post(self._all, body, seconds=SECONDS)

    async def put(self, body: KubeObject) -> KubeObject:
        return await self.api.put(f"{self._all}/{self.name}", body, seconds=SECONDS)


def content_of(body: KubeObject) -> tuple[object, object]:
    return body["spec"], body["metadata"]["annotations"]


class LeaseContract:
    async def test_a_missing_lease_is_not_found(self, client: LeaseClient) -> None:
        with pytest.raises(StatusError) as refused:
            await client.get()
        assert refused.value.status == NOT_FOUND

    async def test_a_created_lease_is_returned_with_its_version_and_can_be_read(self, client: LeaseClient) -> None:
        made = await client.post(client.lease())
        assert made["metadata"]["resourceVersion"]
        assert content_of(made) == content_of(client.lease())
        read = await client.get()
        assert content_of(read) == content_of(made)
        assert read["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]

    async def test_the_second_creation_of_a_lease_is_refused(self, client: LeaseClient) -> None:
        await client.post(client.lease())
        with pytest.raises(StatusError) as refused:
            await client.post(client.lease(holder="second"))
        assert refused.value.status == CONFLICT
        assert content_of(await client.get()) == content_of(client.lease())

    async def test_a_writer_with_the_newest_version_may_write(self, client: LeaseClient) -> None:
        made = await client.post(client.lease())
        changed = made | {"spec": client.lease(holder="second")["spec"]}
        written = await client.put(changed)
        assert written["metadata"]["resourceVersion"] != made["metadata"]["resourceVersion"]
        assert content_of(written) == content_of(changed)
        assert content_of(await client.put(written | {"spec": made["spec"]})) == content_of(made), (
            "the answer's version is the last"
        )

    async def test_a_writer_with_an_older_version_is_refused_and_changes_nothing(self, client: LeaseClient) -> None:
        made = await client.post(client.lease())
        await client.put(made | {"spec": client.lease(holder="second")["spec"]})
        with pytest.raises(StatusError) as refused:
            await client.put(made | {"spec": client.lease(holder="third")["spec"]})
        assert refused.value.status == CONFLICT
        assert (await client.get())["spec"]["holderIdentity"] == "second"

    async def test_a_removed_lease_cannot_be_written_with_its_old_version(self, client: LeaseClient) -> None:
        made = await client.post(client.lease())
        await self.remove(client)
        with pytest.raises(StatusError) as refused:
            await client.put(made)
        assert refused.value.status == CONFLICT
        with pytest.raises(StatusError):
            await client.get()

    async def test_an_administrators_write_makes_every_older_version_stale(self, client: LeaseClient) -> None:
        made = await client.post(client.lease())
        changed = copy.deepcopy(made)
        changed["spec"]["holderIdentity"] = "an administrator"
        await self.write(client, changed)
        with pytest.raises(StatusError) as refused:
            await client.put(made)
        assert refused.value.status == CONFLICT
        assert (await client.get())["spec"]["holderIdentity"] == "an administrator"

    async def test_answers_are_copies(self, client: LeaseClient) -> None:
        made = await client.post(client.lease())
        made["spec"]["holderIdentity"] = "nobody said so"
        read = await client.get()
        assert read["spec"]["holderIdentity"] == "first"
        read["metadata"]["annotations"].clear()
        assert content_of(await client.get()) == content_of(client.lease())

    async def remove(self, client: LeaseClient) -> None:
        raise NotImplementedError

    async def write(self, client: LeaseClient, body: KubeObject) -> None:
        raise NotImplementedError
