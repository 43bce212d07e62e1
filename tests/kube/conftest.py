import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.cluster import programs
from testbed.cluster.control_plane import NEEDED, Cluster, control_plane
from testbed.cluster.network import CannotIsolate, network
from testbed.cluster.nodes import ClusterNode, addons
from testbed.cluster.nodes import node as one_node
from testbed.fork_server import ForkServer
from testbed.machine import lacking, out_of_reach
from tests.docs.blocks import Shell
from tests.kube.page_shell import page_shell
from tools.kube.binaries import find, uses_existing_cluster


@pytest.fixture(scope="session", autouse=True)
def forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Operators and schedulers that tests start on the control plane are forked: they start two hundred. Those of a
    chart's pods, and all of a soak, which measures them, start as users start them."""
    if "not soak" not in request.config.option.markexpr:
        yield
        return
    programs.fork_server = ForkServer(["motet_operator.cluster", "motet_scheduler"])
    try:
        yield
    finally:
        programs.fork_server.close()
        programs.fork_server = None


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One control plane for the whole run. Tests share it: each uses its own namespace or its own names."""
    folder = tmp_path_factory.mktemp("cluster")
    if uses_existing_cluster():
        kubectl = find("kubectl") or shutil.which("kubectl")
        if kubectl is None:
            lacking("kubectl (make kube)")
        kubeconfig = os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config"
        yield Cluster(Path(kubeconfig), folder, Path(kubectl))
        return
    if missing := [tool for tool in NEEDED if find(tool) is None]:
        lacking(f"{', '.join(missing)} (make kube)")
    try:
        isolated = network()
        with isolated as own, control_plane(folder, own) as started:
            yield started
    except CannotIsolate as error:
        lacking(str(error))


@pytest.fixture(scope="session")
def node(cluster: Cluster) -> Iterator[ClusterNode]:
    """A node that runs pods, for the whole run. A test that breaks something on it repairs it."""
    if cluster.network is None:
        out_of_reach("runs pods on a node of our own, beside a control plane of our own")
    with addons(cluster), one_node(cluster, "node-1", 1) as running:
        yield running


@pytest.fixture
def shell(cluster: Cluster, node: ClusterNode, tmp_path: Path) -> Iterator[Shell]:
    """The shell of a reader who types the commands of a page, on a cluster without Motet."""
    tmp_path.chmod(0o755)
    with page_shell(cluster, tmp_path) as typing:
        yield typing


@pytest.fixture(autouse=True)
def inside(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of a cluster runs inside the cluster's network, and so do the processes that it starts."""
    if "cluster" not in request.fixturenames:
        yield
        return
    with request.getfixturevalue("cluster").inside():
        yield


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")
