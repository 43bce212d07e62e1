"""The files of base models that a gateway keeps."""

import pytest

from motet.errors import MotetError
from motet.transport.over_grpc import GrpcNetwork
from motet_gateway.assets import AssetStore
from tests.common.waiting import until


async def test_files_that_cannot_be_used_cost_no_memory_with_each_request(tmp_path):
    (tmp_path / "0").mkdir()
    loaded = []
    store = AssetStore(tmp_path, lambda: loaded.append(True), network=GrpcNetwork())
    store.fetch("sha256:0", list)
    await until(lambda: loaded)
    depths = set()
    for _ in range(3):
        with pytest.raises(MotetError) as raised:
            store.get("sha256:0")
        depths.add(len(raised.traceback))
    assert len(depths) == 1
