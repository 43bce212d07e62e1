"""What the operator on a cluster sends a real scheduler, and when."""

import time
from collections.abc import Iterator

import pytest

from testbed.cluster.cluster import Cluster
from testbed.cluster.operators import OperatorNamespaces, OperatorProcess, definition_gone, site
from tests.kube.proxy import proxy, status
from tests.kube.schedulers import SchedulerProgram

pytestmark = pytest.mark.kube


@pytest.fixture
def home(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorNamespaces]:
    with cluster.inside(), site(cluster, tmp_path_factory.mktemp("told")) as made:
        yield made


def names(scheduler: SchedulerProgram) -> set[str]:
    """The names of the adapters in the newest catalog, without their namespaces."""
    return {name.rpartition("/")[2] for name in scheduler.adapters()}


def test_a_scheduler_gets_accepted_objects_and_nothing_before_everything_is_listed(
    cluster: Cluster, home: OperatorNamespaces
) -> None:
    tenant = home.tenant()
    cluster.apply(home.pool(), *(home.adapter(name, tenant) for name in ("legal", "medical")))
    cluster.apply(home.adapter("refused", tenant, baseModel="another"))
    with SchedulerProgram(home) as scheduler, proxy(cluster, home.kubeconfig) as door:
        with OperatorProcess(home, kubeconfig=door.kubeconfig):
            cluster.wait_for(lambda: names(scheduler) == {"legal", "medical"})
        told = scheduler.told()

        def no_adapters(method: str, path: str) -> tuple[int, dict[str, object]] | None:
            return status(503, "ServiceUnavailable") if path.endswith("/loraadapters") else None

        door.faults.answer = no_adapters
        blind = OperatorProcess(home, kubeconfig=door.kubeconfig)
        blind.program.start(wait=False)
        try:
            cluster.wait_for(lambda: "loraadapters.motet.dev not listed yet" in blind.ask("readyz")[1])
            time.sleep(2)
            assert scheduler.told() == told
            cluster.apply(home.adapter("later", tenant))
            door.faults.answer = lambda method, path: None
            cluster.wait_for(lambda: names(scheduler) == {"legal", "medical", "later"})
            assert blind.is_ready()
        finally:
            blind.program.stop()


def test_a_scheduler_keeps_its_catalog_while_a_definition_is_gone(cluster: Cluster, home: OperatorNamespaces) -> None:
    """Row 13: nobody has deleted the adapters. They are kept for ten seconds of real time."""
    tenant = home.tenant()
    cluster.apply(home.pool(), *(home.adapter(name, tenant) for name in ("legal", "medical")))
    env = {"MOTET_CLUSTER_RESYNC_SECONDS": "20", "MOTET_CLUSTER_VANISHED_SECONDS": "200"}
    with SchedulerProgram(home) as scheduler, OperatorProcess(home, env=env) as operator:
        cluster.wait_for(lambda: names(scheduler) == {"legal", "medical"})
        with definition_gone(cluster):
            time.sleep(3)
            assert names(scheduler) == {"legal", "medical"}
        cluster.apply(home.adapter("later", tenant))
        cluster.wait_for(lambda: names(scheduler) == {"legal", "medical", "later"}, within_s=9)
        cluster.wait_for(lambda: names(scheduler) == {"later"}, "the adapters that exist, after these ten seconds")
        operator.program.assert_alive()
