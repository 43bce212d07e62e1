"""Runs the tests of Leases on a real API server."""

from collections.abc import AsyncIterator

import pytest

from motet.kube import KubeApi, KubeObject
from testbed.cluster.cluster import Cluster
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
