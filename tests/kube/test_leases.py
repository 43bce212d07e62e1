"""Runs the tests of Leases on a real API server."""

from collections.abc import AsyncIterator

import pytest

from motet.kube import NOT_FOUND, KubeApi, KubeObject, StatusError
from testbed.cluster.cluster import Cluster
from tests.common.waiting import PATIENCE_S
from tests.contract.leases import LeaseClient, LeaseContract


class TestAnApiServer(LeaseContract):
    @pytest.fixture
    async def client(self, cluster: Cluster, namespace: str) -> AsyncIterator[LeaseClient]:
        self.cluster = cluster
        async with KubeApi(cluster.kubeconfig, "the test") as api:
            yield LeaseClient(api, namespace, "it")

    async def remove(self, client: LeaseClient) -> None:
        self.cluster.kubectl("delete", "lease", client.name, f"--namespace={client.namespace}")

    async def write(self, client: LeaseClient, body: KubeObject) -> None:
        holder = body["spec"]["holderIdentity"]
        self.cluster.kubectl(
            "patch", "lease", client.name, f"--namespace={client.namespace}", "--type=merge",
            "--patch", f'{{"spec": {{"holderIdentity": "{holder}"}}}}',
        )  # fmt: skip


@pytest.mark.parametrize("path", ["/apis/nowhere.example/v1/things", "/api/v1/namespaces/default/configmaps/nothing"])
async def test_what_does_not_exist_is_gone_by_the_word_of_the_api_server(cluster: Cluster, path: str) -> None:
    """Of a kind that it does not serve, it says what a proxy would."""
    async with KubeApi(cluster.kubeconfig, "the test") as api:
        with pytest.raises(StatusError) as refused:
            await api.get(path, seconds=PATIENCE_S)
    assert refused.value.status == NOT_FOUND
