import pytest

from testbed.machine import lacking
from tools.kube.binaries import find


@pytest.fixture(autouse=True)
def _helm() -> None:
    """These tests need Helm. Where they must run they fail without it, because a skip would look green."""
    if find("helm") is None:
        lacking("helm (make kube)")
