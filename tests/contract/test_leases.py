"""The Lease of the unit tests. `tests/kube/test_leases.py` runs the same tests on a real API server."""

import pytest

from motet.kube import KubeObject
from motet_simulator.leases import FakeLeaseApi
from tests.contract.leases import LeaseClient, LeaseContract


class TestFakeLeaseApi(LeaseContract):
    @pytest.fixture
    def client(self) -> LeaseClient:
        return LeaseClient(FakeLeaseApi(), "here", "it")

    async def remove(self, client: LeaseClient) -> None:
        client.api.lease = None

    async def write(self, client: LeaseClient, body: KubeObject) -> None:
        client.api.write(body)
