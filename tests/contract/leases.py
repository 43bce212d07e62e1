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


def said(body: KubeObject) -> tuple[object, object]:
    return body["spec"], body["metadata"]["annotations"]


class LeaseContract:
    async def test_a_missing_lease_is_not_found(self, line: LeaseClient) -> None:
        with pytest.raises(StatusError) as refused:
            await line.get()
        assert refused.value.status == NOT_FOUND

    async def test_a_created_lease_is_returned_with_its_version_and_can_be_read(self, line: LeaseClient) -> None:
        made = await line.post(line.lease())
        assert made["metadata"]["resourceVersion"]
        assert said(made) == said(line.lease())
        read = await line.get()
        assert said(read) == said(made)
        assert read["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]

    async def test_the_second_creation_of_a_lease_is_refused(self, line: LeaseClient) -> None:
        await line.post(line.lease())
        with pytest.raises(StatusError) as refused:
            await line.post(line.lease(holder="second"))
        assert refused.value.status == CONFLICT
        assert said(await line.get()) == said(line.lease())

    async def test_a_writer_with_the_newest_version_may_write(self, line: LeaseClient) -> None:
        made = await line.post(line.lease())
        changed = made | {"spec": line.lease(holder="second")["spec"]}
        written = await line.put(changed)
        assert written["metadata"]["resourceVersion"] != made["metadata"]["resourceVersion"]
        assert said(written) == said(changed)
        assert said(await line.put(written | {"spec": made["spec"]})) == said(made), "the answer's version is the last"

    async def test_a_writer_with_an_older_version_is_refused_and_changes_nothing(self, line: LeaseClient) -> None:
        made = await line.post(line.lease())
        await line.put(made | {"spec": line.lease(holder="second")["spec"]})
        with pytest.raises(StatusError) as refused:
            await line.put(made | {"spec": line.lease(holder="third")["spec"]})
        assert refused.value.status == CONFLICT
        assert (await line.get())["spec"]["holderIdentity"] == "second"

    async def test_a_removed_lease_cannot_be_written_with_its_old_version(self, line: LeaseClient) -> None:
        made = await line.post(line.lease())
        await self.remove(line)
        with pytest.raises(StatusError) as refused:
            await line.put(made)
        assert refused.value.status == CONFLICT
        with pytest.raises(StatusError):
            await line.get()

    async def test_an_administrators_write_makes_every_older_version_stale(self, line: LeaseClient) -> None:
        made = await line.post(line.lease())
        changed = copy.deepcopy(made)
        changed["spec"]["holderIdentity"] = "an administrator"
        await self.write(line, changed)
        with pytest.raises(StatusError) as refused:
            await line.put(made)
        assert refused.value.status == CONFLICT
        assert (await line.get())["spec"]["holderIdentity"] == "an administrator"

    async def test_answers_are_copies(self, line: LeaseClient) -> None:
        made = await line.post(line.lease())
        made["spec"]["holderIdentity"] = "nobody said so"
        read = await line.get()
        assert read["spec"]["holderIdentity"] == "first"
        read["metadata"]["annotations"].clear()
        assert said(await line.get()) == said(line.lease())

    async def remove(self, line: LeaseClient) -> None:
        raise NotImplementedError

    async def write(self, line: LeaseClient, body: KubeObject) -> None:
        raise NotImplementedError
