"""The runner's disk is full while files come over the network. The fetch process meets it first."""

import pytest

from motet.digest import adapter_digest
from motet.errors import AdapterFetchFailed
from motet_runner.sources.fetch_errors import NO_SPACE
from tests.runner_service.sources.conftest import FetchSetup
from tests.support.in_process_runner import write_adapter
from tests.support.small_disk import small_disk

SIZE = "48k"
"""Less than `adapter` has, and enough for a small one if nothing is left of that."""


@pytest.fixture
def fetch_setup(tmp_path):
    with small_disk(tmp_path / "small", SIZE) as place:
        yield FetchSetup(place)


@pytest.fixture(params=["web", "store", "registry"])
def publish(request):
    """Puts an adapter's folder on a server. Returns its address."""
    server = request.getfixturevalue(request.param)

    def published(name, folder):
        match request.param:
            case "web":
                return server.put(f"/{name}/", folder)
            case "store":
                server.public.add("models")
                return server.publish("models", name, folder)
            case _:
                return server.publish(name, "v1", folder)

    return published


async def test_a_full_disk_fails_one_fetch_and_leaves_nothing_of_it(fetch_setup, publish, tmp_path, adapter):
    large, small = publish("large", adapter), write_adapter(tmp_path / "other")
    for _ in range(2):
        with pytest.raises(AdapterFetchFailed) as failed:
            await fetch_setup.fetch(large)
        assert failed.value.reason == NO_SPACE
        assert failed.value.message.endswith(f" for {large}. Free some space. Motet tries again automatically.")
        assert (fetch_setup.cached(), fetch_setup.partial()) == ([], [])
    fetched = await fetch_setup.fetch(publish("small", small), manifest="b")
    assert fetched.digest == adapter_digest(small)
