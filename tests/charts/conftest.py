import os

import pytest

from tools.kube.locate import find


@pytest.fixture(autouse=True)
def helm_is_built(request: pytest.FixtureRequest) -> None:
    """Tests of what Helm renders need Helm; those of files do not, and say `pytestmark = []`."""
    if request.module.__name__.endswith("test_dockerfiles") or find("helm") is not None:
        return
    if os.environ.get("CI"):
        pytest.fail("run make kube (helm not built)", pytrace=False)
    pytest.skip("run make kube (helm not built)")
