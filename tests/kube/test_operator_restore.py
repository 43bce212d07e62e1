"""The API server's store is restored to an earlier state while an operator runs that has seen a later one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.cluster.control_plane import NEEDED, Cluster, control_plane
from testbed.cluster.network import network
from testbed.cluster.operators import OperatorNamespaces, OperatorProcess, site
from testbed.machine import lacking
from tools.kube.binaries import find

pytestmark = pytest.mark.kube

IN_SYNC_WITHIN_S = 10.0

NO_RESYNC = {"MOTET_TIME_SCALE": "1", "MOTET_CLUSTER_RESYNC_SECONDS": "4000"}
"""With these settings there is no resync, and no watch ends by its age, within this test."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A separate control plane: otherwise the objects of all other tests would be restored, too."""
    if missing := [tool for tool in NEEDED if find(tool) is None]:
        lacking(f"{', '.join(missing)} (make kube)")
    with network() as own, control_plane(tmp_path, own) as started:
        yield started


@pytest.fixture
def home(cluster: Cluster, tmp_path: Path) -> Iterator[OperatorNamespaces]:
    with cluster.inside(), site(cluster, tmp_path) as made:
        yield made


def test_row_7_after_a_restore_of_etcd_the_operator_is_in_sync_without_a_restart(
    cluster: Cluster, home: OperatorNamespaces
) -> None:
    assert cluster.store is not None
    tenant = home.tenant("restored")
    with OperatorProcess(home, env=NO_RESYNC, lease=True) as operator:

        def deployments(pool: str) -> list[str]:
            where = (f"--namespace={home.pools}", f"--selector=motet.dev/pool={pool}")
            return [one["metadata"]["name"] for one in cluster.items("deployments", *where)]

        def says(adapter: str, reason: str) -> bool:
            return home.ready_reason("lora", adapter, tenant) == reason

        cluster.apply(home.pool("kept", replicas=1))
        cluster.apply(*(home.adapter(name, tenant, "kept") for name in ("changed-since", "deleted-since", "kept")))
        cluster.wait_for(lambda: says("kept", "WaitingForRunner") and deployments("kept"))
        term, process = home.lease_term(), operator.program.pid
        copy = home.folder / "snapshot"
        cluster.store.snapshot(copy)

        cluster.apply(home.adapter("changed-since", tenant, "kept", suspend=True))
        cluster.kubectl("delete", "lora", "deleted-since", f"--namespace={tenant}")
        cluster.apply(home.pool("made-since", replicas=1), home.adapter("made-since", tenant, "made-since"))
        cluster.wait_for(lambda: says("changed-since", "Suspended") and says("made-since", "WaitingForRunner"))
        # After the restore, revisions stay below those that the operator has seen for a while.
        cluster.apply(*(_config_map(f"number-{number}", tenant) for number in range(200)))

        cluster.store.restore(copy)
        assert says("changed-since", "WaitingForRunner")  # the store has the earlier state
        cluster.apply(home.adapter("afterwards", tenant, "kept"))
        cluster.apply(home.adapter("deleted-since", tenant, "kept", suspend=True))
        cluster.apply(home.adapter("kept", tenant, "kept", suspend=True))
        cluster.apply(home.pool("afterwards", replicas=1))
        cluster.wait_for(
            lambda: (
                says("afterwards", "WaitingForRunner")
                and says("deleted-since", "Suspended")
                and says("kept", "Suspended")
                and deployments("afterwards")
                # The operator may have created it again before it noticed the restore.
                and not deployments("made-since")
            ),
            "the operator to act on changes after the restore",
            within_s=IN_SYNC_WITHIN_S,
        )
        watched = ("loraadapters", "servingpools", "deployments")
        cluster.wait_for(
            lambda: all(operator.metric("motet_kubernetes_store_rewinds_total", resource=one) >= 1 for one in watched),
            "each watch to notice the restore",
            within_s=IN_SYNC_WITHIN_S,
        )
        # A watch must report it: there is no resync.
        cluster.apply(home.adapter("changed-since", tenant, "kept", suspend=True))
        cluster.wait_for(lambda: says("changed-since", "Suspended"), within_s=IN_SYNC_WITHIN_S)
        operator.program.assert_alive()
        assert (home.lease_term(), operator.program.pid) == (term, process)


def _config_map(name: str, namespace: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace}}
