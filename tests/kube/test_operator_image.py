"""The operator's image contains all that the operator needs on a cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.cluster.cluster import Cluster
from testbed.cluster.operators import site
from testbed.ports import free_port
from tests.images.installation import USER, Installed, build_wheel, installation, user_of, volume

pytestmark = [pytest.mark.kube, pytest.mark.soak]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """It is installed before the test enters the cluster's network, which has no package registry."""
    with installation("operator", build_wheel(tmp_path_factory.mktemp("wheel"))) as made:
        yield made


def test_the_operator_runs_with_the_files_of_its_image(installed: Installed, cluster: Cluster, tmp_path: Path) -> None:
    port = free_port()
    with site(cluster, tmp_path) as home, volume(home.kubeconfig, home.template) as files:
        env = {
            "MOTET_METRICS_ADDRESS": f"127.0.0.1:{port}",
            "MOTET_SCHEDULER_ADDRESS": "unix:/tmp/scheduler.sock",
            "MOTET_CLUSTER_KUBECONFIG": str(files / home.kubeconfig.name),
            "MOTET_CLUSTER_NAMESPACE": home.home,
            "MOTET_CLUSTER_POOL_NAMESPACES": f'["{home.pools}"]',
            "MOTET_CLUSTER_RUNNER_TEMPLATE": str(files / home.template.name),
        }
        with installed.serving(port, "/livez", "/readyz", env=env) as process:
            assert user_of(process) == USER
            cluster.apply(home.pool())
            cluster.wait_for(lambda: home.ready_reason("spool", "demo", home.pools) == "RunnersStarting")
            cluster.wait_for(lambda: cluster.items("deployments", f"--namespace={home.pools}"))
            process.terminate()
            assert process.wait(30) == 0
