"""The Lease of the unit tests. `tests/kube/test_leases.py` runs the same tests on a real API server."""

import pytest

from motet.kube import KubeObject
from tests.common.leases import FakeLeaseApi
from tests.contract.leases import LeaseClient, LeaseContract


class TestTheDouble(LeaseContract):
    @pytest.fixture
    def line(self) -> LeaseClient:
        return LeaseClient(FakeLeaseApi(), "here", "it")

    async def remove(self, line: LeaseClient) -> None:
        line.api.lease = None

    async def write(self, line: LeaseClient, body: KubeObject) -> None:
        line.api.write(body)
