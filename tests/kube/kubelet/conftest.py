import uuid
from collections.abc import Iterator

import pytest

from testbed.cluster.cluster import Cluster
from testbed.cluster.nodes import ClusterNode
from tests.kube.pods import Pods


@pytest.fixture(scope="module")
def pods(cluster: Cluster, node: ClusterNode) -> Iterator[Pods]:
    """Pods of a namespace that the tests of a module share, on a node that runs them."""
    name = f"pods-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    cluster.wait_for(lambda: cluster.get("serviceaccount", "default", f"--namespace={name}"), "the account of pods")
    yield Pods(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")
