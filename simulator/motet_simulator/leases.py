"""A Lease in memory, like that of an API server, which a test can make fail; and one candidate's client of it."""

import asyncio
import copy

from motet.kube import CONFLICT, NOT_FOUND, KubeObject, StatusError, Unreachable


class FakeLeaseApi:
    def __init__(self) -> None:
        self.lease: KubeObject | None = None
        self.away = False
        """If true, no request arrives."""
        self.deaf = False
        """If true, requests arrive and answers are lost."""
        self.refusing: StatusError | None = None
        self.creation_fails: Exception | None = None
        self.version = 0
        self.writes = 0

    @property
    def term(self) -> int:
        assert self.lease is not None
        return int(self.lease["metadata"]["annotations"]["motet.dev/term"])

    @property
    def holder(self) -> str:
        return self.lease["spec"]["holderIdentity"] if self.lease is not None else ""

    def write(self, lease: KubeObject) -> None:
        """Write it in any state, as an administrator would."""
        self.version += 1
        self.lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **copy.deepcopy(lease)}
        self.lease["metadata"]["resourceVersion"] = str(self.version)

    async def get(self, path: str, *, seconds: float) -> KubeObject:
        assert path == "/apis/coordination.k8s.io/v1/namespaces/here/leases/it"
        await self._arrive()
        if self.lease is None:
            raise StatusError(NOT_FOUND, "not found")
        return copy.deepcopy(self.lease)

    async def post(self, path: str, body: KubeObject, *, seconds: float) -> KubeObject:
        await self._arrive()
        if self.lease is not None:
            raise StatusError(CONFLICT, "exists")
        if self.creation_fails is not None:
            raise self.creation_fails
        return self._written(body)

    async def put(self, path: str, body: KubeObject, *, seconds: float) -> KubeObject:
        await self._arrive()
        if self.lease is None or body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise StatusError(CONFLICT, "changed")
        return self._written(body)

    async def _arrive(self) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise Unreachable("away")
        if self.refusing is not None:
            raise self.refusing

    def _written(self, body: KubeObject) -> KubeObject:
        self.write(body)
        self.writes += 1
        if self.deaf:
            raise Unreachable("no answer")
        return copy.deepcopy(body) | {"metadata": {**body["metadata"], "resourceVersion": str(self.version)}}


class CuttableLeaseClient:
    """One candidate's client of the Lease, which a test can cut off."""

    def __init__(self, leases: FakeLeaseApi) -> None:
        self._leases = leases
        self.cut = False

    async def get(self, path: str, *, seconds: float) -> KubeObject:
        self._must_be_whole()
        return await self._leases.get(path, seconds=seconds)

    async def post(self, path: str, body: KubeObject, *, seconds: float) -> KubeObject:
        self._must_be_whole()
        return await self._leases.post(path, body, seconds=seconds)

    async def put(self, path: str, body: KubeObject, *, seconds: float) -> KubeObject:
        self._must_be_whole()
        return await self._leases.put(path, body, seconds=seconds)

    def _must_be_whole(self) -> None:
        if self.cut:
            raise Unreachable("cut")
