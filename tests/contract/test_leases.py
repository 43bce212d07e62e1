"""The Lease of the unit tests. `tests/kube/test_leases.py` asks the same of a real API server."""

import pytest

from motet.kube import KubeObject
from tests.common.leases import Leases
from tests.contract.leases import LeaseContract, Line


class TestTheDouble(LeaseContract):
    @pytest.fixture
    def line(self) -> Line:
        return Line(Leases(), "here", "it")

    async def remove(self, line: Line) -> None:
        line.api.lease = None

    async def write(self, line: Line, body: KubeObject) -> None:
        line.api.write(body)
