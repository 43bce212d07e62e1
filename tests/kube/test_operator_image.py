"""What the operator's image holds is enough to be ready on a cluster, and to act there."""

from pathlib import Path

import pytest

from tests.images.installation import USER, build_wheel, free_port, installation, user_of, volume
from tests.kube.cluster import Cluster
from tests.kube.operators import site

pytestmark = [pytest.mark.kube, pytest.mark.soak]


def test_the_operator_acts_on_what_its_image_holds(cluster: Cluster, tmp_path: Path) -> None:
    wheel, port = build_wheel(tmp_path), free_port()
    with (
        installation("operator", wheel) as installed,
        site(cluster, tmp_path) as home,
        volume(home.kubeconfig, home.template) as files,
    ):
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
