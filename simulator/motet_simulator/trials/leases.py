"""The API server of a trial, which has a Lease, and the way of each process to it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from motet.kube import KubeObject
from motet_simulator.leases import FakeLeaseApi
from motet_simulator.world import Process

GARBLED = "the answer is no JSON"


class TrialLeases(FakeLeaseApi):
    garbled = False
    """Whether nobody can read its answers."""


class LeaseClient:
    """The way of one process to the API server."""

    def __init__(self, leases: TrialLeases, process: Process) -> None:
        self._leases = leases
        self._process = process
        self._calls = 0

    async def get(self, path: str, *, seconds: float) -> KubeObject:
        return await self._call(self._leases.get(path, seconds=seconds))

    async def post(self, path: str, body: KubeObject, *, seconds: float) -> KubeObject:
        return await self._call(self._leases.post(path, body, seconds=seconds))

    async def put(self, path: str, body: KubeObject, *, seconds: float) -> KubeObject:
        return await self._call(self._leases.put(path, body, seconds=seconds))

    async def _call(self, call: Coroutine[Any, Any, KubeObject]) -> KubeObject:
        self._calls += 1
        await asyncio.sleep(self._way("there"))
        if self._leases.away:
            self._process.world.on_met("leases away", "")
        answer = await call
        await asyncio.sleep(self._way("back"))
        if self._leases.garbled:
            self._process.world.on_met("leases garbled", "")
            raise ValueError(GARBLED)
        return answer

    def _way(self, which: str) -> float:
        return 0.002 + 0.02 * self._process.world.draw("lease", self._process.name, which, self._calls)
