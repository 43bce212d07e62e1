import pytest

from tests.support.machine import lacking
from tools.kube.binaries import find


@pytest.fixture(autouse=True)
def _helm() -> None:
    """These tests look at what Helm makes of the charts. Where they are meant to run, skipping would look green."""
    if find("helm") is None:
        lacking("helm (make kube)")
