"""What the operator takes for an answer of the API server."""

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from motet.kube import KubeCredentials, Unreachable
from motet_operator.cluster.api import Api, RequestLimiter
from motet_operator.cluster.cache import Cache
from motet_operator.cluster.kinds import ADAPTERS, Object
from motet_operator.cluster.obstacles import ObstacleLog
from motet_operator.cluster.resync import Resync
from motet_operator.metrics import ClusterMetrics
from tests.common.test_kube import Server, kubeconfig
from tests.operator.cluster.objects import adapter


def listed(*items: Object) -> Object:
    return {"items": list(items), "metadata": {"resourceVersion": "1000000"}}


@pytest.mark.parametrize("body", [b"<html>maintenance</html>", b"", {"status": "ok"}])
async def test_a_page_of_a_proxy_is_not_a_list_without_objects(tmp_path: Path, body: Any) -> None:
    server, metrics, cache = Server((200, listed(adapter("one")))), ClusterMetrics(CollectorRegistry()), Cache()
    async with server.up() as port:
        credentials = KubeCredentials(kubeconfig(tmp_path, f"http://127.0.0.1:{port}"), "IT")
        api = Api(credentials, RequestLimiter(1000, 1000), metrics)
        resync = Resync(
            api,
            cache,
            ObstacleLog(),
            metrics,
            (),
            seconds=300,
            changed=lambda: None,
            restart_watch=lambda _: None,
            unwatchable=lambda _: None,
        )
        try:
            assert await resync.list_one(ADAPTERS, "")
            server.answers = [(200, body)]
            assert not await resync.list_one(ADAPTERS, "")
        finally:
            await api.close()
    assert cache.count(ADAPTERS) == 1, "what is known stays in use"


async def test_a_page_of_a_proxy_does_not_say_that_a_kind_has_gone(tmp_path: Path) -> None:
    server = Server((200, {"status": "ok"}))
    async with server.up() as port:
        credentials = KubeCredentials(kubeconfig(tmp_path, f"http://127.0.0.1:{port}"), "IT")
        api = Api(credentials, RequestLimiter(1000, 1000), ClusterMetrics(CollectorRegistry()))
        try:
            with pytest.raises(Unreachable, match="is no list"):
                await api.verbs(ADAPTERS)
            server.answers = [(200, {"resources": [{"name": ADAPTERS.plural, "verbs": ["create"]}]})]
            assert await api.verbs(ADAPTERS) == {"create"}
            server.answers = [(200, {"resources": None})]
            assert not await api.verbs(ADAPTERS)
        finally:
            await api.close()
