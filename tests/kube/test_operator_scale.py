"""Ten thousand adapters, with runners on simulated nodes (KWOK). Long: part of `make soak`."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from motet_operator.cluster.events import MAX_PENDING
from motet_operator.cluster.kinds import POOLS
from motet_operator.settings import ClusterSettings
from testbed.cluster.cluster import Cluster
from testbed.cluster.control_plane import NEEDED, control_plane
from testbed.cluster.many_adapters import (
    REAL_TIME,
    admin_api,
    last_status,
    load_of,
    peak_mib,
    populate,
    wait_for_status,
)
from testbed.cluster.network import network
from testbed.cluster.operators import TEMPLATE, OperatorNamespaces, OperatorProcess, site
from testbed.cluster.programs import Program
from testbed.machine import lacking
from tools.kube.binaries import find

pytestmark = [pytest.mark.kube, pytest.mark.soak, pytest.mark.timeout(1200)]

ADAPTERS, TENANTS, POOL_COUNT, RUNNERS = 10_000, 200, 20, 5
WITHIN_S = 90.0
EVENTS_PER_SECOND = ClusterSettings().events_per_second
IDLE_S = 30.0
NODE = "pretender-0"


def stage(name: str, kind: str, key: str, operator: str, then: dict[str, object], *values: str) -> dict[str, object]:
    """What KWOK does to a node or pod that looks like this."""
    matches = {"key": key, "operator": operator} | ({"values": list(values)} if values else {})
    spec = {
        "resourceRef": {"apiGroup": "v1", "kind": kind},
        "selector": {"matchExpressions": [matches]},
        "next": then,
    }
    return {"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "Stage", "metadata": {"name": name}, "spec": spec}


READY = """
phase: Running
conditions:
- {type: Ready, status: "True", reason: KubeletReady, message: pretends, lastTransitionTime: {{ Now | Quote }}}
"""
STAGES = [
    stage(
        "node",
        "Node",
        '.status.conditions.[] | select( .type == "Ready" ) | .status',
        "NotIn",
        {"statusTemplate": READY},
        "True",
    ),
    stage("pod", "Pod", ".status.phase", "In", {"statusTemplate": READY}, "Pending"),
    stage("gone", "Pod", ".metadata.deletionTimestamp", "Exists", {"delete": True}),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane of its own: other tests must not see ten thousand objects. Its controllers wait long before they
    treat a silent node as lost: on a busy machine the nodes of KWOK are silent for a while."""
    if missing := [tool for tool in (*NEEDED, "kwok") if find(tool) is None]:
        lacking(f"{', '.join(missing)} (make kube)")
    folder = tmp_path_factory.mktemp("cluster")
    with network() as own, control_plane(folder, own, node_grace_s=600) as started:
        yield started


@pytest.fixture
def home(cluster: Cluster, tmp_path: Path) -> Iterator[OperatorNamespaces]:
    with cluster.inside(), site(cluster, tmp_path) as made:
        template = {**TEMPLATE, "spec": {**TEMPLATE["spec"], "nodeName": NODE}}
        made.template.write_text(yaml.safe_dump(template))
        yield made


@pytest.fixture
def pretender(cluster: Cluster, tmp_path: Path) -> Iterator[Program]:
    """A node on which every pod is ready at once."""
    kwok = find("kwok")
    assert kwok is not None
    assert cluster.network is not None
    room = {"pods": "1000", "cpu": "1000", "memory": "1Ti"}
    metadata = {"name": NODE, "annotations": {"kwok.x-k8s.io/node": "fake"}}
    cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": {"allocatable": room}})
    stages = tmp_path / "stages.yaml"
    stages.write_text(yaml.safe_dump_all(STAGES))
    command = [str(kwok), f"--kubeconfig={cluster.kubeconfig}", f"--config={stages}", "--manage-all-nodes=false"]
    command += ["--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake"]

    def ready() -> bool:
        conditions = cluster.get("node", NODE).get("status", {}).get("conditions", [])
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    with Program(command, tmp_path / "kwok.log", cluster.network, ready) as running:
        yield running
    cluster.kubectl("delete", "node", NODE)


async def test_ten_thousand_adapters_have_their_status_in_time(
    cluster: Cluster, home: OperatorNamespaces, pretender: Program
) -> None:
    async with admin_api(cluster) as api:
        tenants = await populate(api, home, ADAPTERS, TENANTS, "many")
        for number in range(POOL_COUNT):
            await api.apply(POOLS, home.pool(f"pool-{number}", replicas=RUNNERS), manager="test")
        began = datetime.now(UTC)
        with OperatorProcess(home, env=REAL_TIME) as operator:
            await wait_for_status(api, tenants, ADAPTERS, operator.program.assert_alive, 600)
            took = (last_status(cluster, tenants) - began).total_seconds()
            print(f"{ADAPTERS} adapters have their status after {took:.0f} s")
            for number in range(POOL_COUNT):
                name = f"pool-{number}"
                cluster.wait_for(
                    lambda name=name: home.ready_reason("spool", name, home.pools) == "AllRunnersReady",
                    f"all runners of {name}",
                    within_s=120,
                )
            # Events have a rate limit, so the last ones arrive late.
            await asyncio.sleep(MAX_PENDING / EVENTS_PER_SECOND + 5)
            before = len(cluster.audit(home.user))
            await asyncio.sleep(IDLE_S)
            idle, peak = load_of(home, since=before), peak_mib(operator.program.pid)
            rounds = operator.metric("motet_reconcile_seconds_sum") / operator.metric("motet_reconciles_total")
    print(f"a round takes {rounds:.2f} s; {idle.writes} writes afterwards; peak {peak:.0f} MiB")
    assert idle.writes == 0
    assert took <= WITHIN_S
