"""A pool's size on a real control plane: a real HorizontalPodAutoscaler, kubectl scale, and the scheduler's advice."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from motet.api.v1 import scheduler_pb2
from motet_operator.cluster.object_parser import scale_writers
from testbed.cluster.cluster import Cluster
from testbed.cluster.network import Network
from testbed.cluster.operators import OperatorNamespaces, OperatorProcess, site
from testbed.cluster.programs import Program
from testbed.tree import ROOT
from tests.kube.external_metrics import ExternalMetrics, external_metrics
from tests.support.fake_gateway import fake_gateway
from tests.support.in_process_services import until

pytestmark = [
    pytest.mark.kube,
    pytest.mark.own_cluster,  # a cluster has only one external metrics API
]

DESIRED = "motet_pool_desired_replicas"


@pytest.fixture(scope="module")
def home(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorNamespaces]:
    with cluster.inside(), site(cluster, tmp_path_factory.mktemp("scaling")) as made, OperatorProcess(made):
        yield made


@pytest.fixture(scope="module")
def metrics(cluster: Cluster, home: OperatorNamespaces) -> Iterator[ExternalMetrics]:
    with cluster.inside(), external_metrics(cluster, home.home) as served:
        yield served


def autoscaler(home: OperatorNamespaces, pool: str) -> dict[str, Any]:
    """The autoscaler of the example, for a pool of the test."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "autoscaling" / "hpa.yaml").read_text())
    document["metadata"] = {"name": pool, "namespace": home.pools}
    spec = document["spec"]
    spec["scaleTargetRef"]["name"] = pool
    spec["maxReplicas"] = 5
    (metric,) = spec["metrics"]
    metric["external"]["metric"]["selector"]["matchLabels"] = {"pool_namespace": home.pools, "pool": pool}
    return document


def builtin(low: int, high: int, **more: int) -> dict[str, Any]:
    return {"mode": "Builtin", "minReplicas": low, "maxReplicas": high} | more


class PoolSeen:
    """One pool, as kubectl shows it."""

    def __init__(self, home: OperatorNamespaces, name: str) -> None:
        self._home, self._name = home, name

    @property
    def spec(self) -> int:
        return int(self._object["spec"]["replicas"])

    @property
    def desired(self) -> int:
        return int(self.status["desiredReplicas"])

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self._object["status"]
        return found

    @property
    def pods(self) -> int:
        where = (f"--namespace={self._home.pools}", f"--selector=motet.dev/pool={self._name}")
        return len(
            [one for one in self._home.cluster.items("pods", *where) if "deletionTimestamp" not in one["metadata"]]
        )

    @property
    def scaling(self) -> dict[str, Any]:
        return self._home.conditions("spool", self._name, self._home.pools)["ScalingActive"]

    @property
    def _object(self) -> dict[str, Any]:
        return self._home.cluster.get("spool", self._name, f"--namespace={self._home.pools}")


def test_a_real_autoscaler_scales_a_pool_up_and_down_by_the_schedulers_figure(
    cluster: Cluster, home: OperatorNamespaces, metrics: ExternalMetrics
) -> None:
    pool = PoolSeen(home, "external")
    scaling = {"mode": "External", "minReplicas": 1, "maxReplicas": 4}
    metrics.set(DESIRED, 3, pool_namespace=home.pools, pool="external")
    cluster.apply(home.pool("external", autoscaling=scaling), autoscaler(home, "external"))
    cluster.wait_for(lambda: (pool.spec, pool.desired, pool.pods) == (3, 3, 3), within_s=60)
    assert (pool.scaling["status"], pool.scaling["reason"]) == ("True", "External")
    assert metrics.asked[-1] == f"{DESIRED}{{pool=external,pool_namespace={home.pools}}}"

    metrics.set(DESIRED, None, pool_namespace=home.pools, pool="external")
    asked = len(metrics.asked)
    cluster.wait_for(lambda: len(metrics.asked) > asked + 2)
    assert (pool.spec, pool.pods) == (3, 3), "an unknown value removes no runner"

    metrics.set(DESIRED, 1, pool_namespace=home.pools, pool="external")
    cluster.wait_for(lambda: (pool.spec, pool.desired, pool.pods) == (1, 1, 1), within_s=60)

    metrics.set(DESIRED, 5, pool_namespace=home.pools, pool="external")
    cluster.wait_for(lambda: (pool.spec, pool.desired, pool.pods) == (5, 4, 4), within_s=60)
    assert pool.scaling["reason"] == "AtMaximum"


def test_runners_that_drain_do_not_count_for_an_autoscaler(
    cluster: Cluster, home: OperatorNamespaces, metrics: ExternalMetrics
) -> None:
    """An autoscaler leaves a number alone that is within a tenth of what its figure asks for: 19 of 20, where 15 are
    wanted and 5 of 20 drain. It must not write the 20."""
    pool = PoolSeen(home, "draining")
    scaling = {"mode": "External", "minReplicas": 1, "maxReplicas": 30}
    figure = {"pool_namespace": home.pools, "pool": "draining"}

    def serve() -> bool:
        """Make pods ready, as a kubelet would: no kubelet runs here."""
        where = (f"--namespace={home.pools}", "--selector=motet.dev/pool=draining")
        pods = cluster.items("pods", *where)
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        for pod in pods:
            if not any(one["type"] == "Ready" for one in pod["status"].get("conditions", ())):
                patch = f"--patch={json.dumps({'status': status})}"
                name = pod["metadata"]["name"]
                cluster.kubectl("patch", "pod", name, where[0], "--subresource=status", "--type=merge", patch)
        return len(pods) == 20

    metrics.set(DESIRED, 20, **figure)
    document = autoscaler(home, "draining")
    document["spec"]["maxReplicas"] = 30
    cluster.apply(home.pool("draining", autoscaling=scaling, drainTimeoutSeconds=600), document)
    cluster.wait_for(serve, "twenty pods", within_s=180)
    cluster.wait_for(lambda: pool.status["readyReplicas"] == 20, within_s=60)

    metrics.set(DESIRED, 15, **figure)
    cluster.wait_for(lambda: (pool.spec, pool.status["drainingReplicas"]) == (15, 5), within_s=60)
    assert (pool.status["replicas"], pool.status["stayingReplicas"]) == (20, 15)

    metrics.set(DESIRED, 19, **figure)
    cluster.wait_for(lambda: pool.spec != 15, within_s=60)
    asked = len(metrics.asked)
    cluster.wait_for(lambda: len(metrics.asked) > asked + 3, within_s=60)
    assert (pool.spec, pool.desired) == (19, 19)


def test_an_autoscaler_on_a_pool_that_scales_itself_is_a_conflict_until_one_of_them_goes(
    cluster: Cluster, home: OperatorNamespaces, metrics: ExternalMetrics
) -> None:
    pool = PoolSeen(home, "both")
    manifest = home.pool("both", replicas=2, autoscaling=builtin(1, 5))
    cluster.apply(manifest)
    cluster.wait_for(lambda: (pool.desired, pool.pods) == (2, 2))
    assert pool.scaling["reason"] == "HoldingStaleAdvice"
    metrics.set(DESIRED, 4, pool_namespace=home.pools, pool="both")
    cluster.apply(autoscaler(home, "both"))
    cluster.wait_for(lambda: pool.scaling["reason"] == "ConflictingManager")
    assert pool.scaling["status"] == "False"
    assert "kube-controller-manager writes spec.replicas" in pool.scaling["message"]
    assert (pool.spec, pool.desired, pool.pods) == (4, 2, 2), "what there is stays"
    before = len(cluster.audit())
    for figure in (1, 5, 3):  # the other one continues
        metrics.set(DESIRED, figure, pool_namespace=home.pools, pool="both")
        cluster.wait_for(lambda: pool.spec == figure, f"the autoscaler's {figure}", within_s=60)  # noqa: B023
    cluster.wait_for(lambda: pool.scaling["message"], "the condition after the last change")
    scaled = [
        entry["requestURI"]
        for entry in cluster.audit()[before:]
        if entry["verb"] in ("create", "update", "patch", "delete")
        and entry["objectRef"].get("namespace") == home.pools
        and entry["objectRef"]["resource"] in ("deployments", "replicasets", "pods")
        and entry["objectRef"].get("subresource") != "status"
    ]
    assert scaled == [], "nothing flaps"
    assert (pool.scaling["reason"], pool.desired, pool.pods) == ("ConflictingManager", 2, 2)
    # As the message says.
    cluster.kubectl("delete", "hpa", "both", f"--namespace={home.pools}")
    path = Path(home.folder / "both.json")
    path.write_text(json.dumps(manifest))
    cluster.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={path}")
    cluster.wait_for(lambda: pool.scaling["reason"] == "HoldingStaleAdvice")
    assert (pool.desired, pool.pods) == (2, 2)
    # A person who scales back and forth holds the field with the value of the manifest. Equal values are shared.
    for figure in (3, 2):
        cluster.kubectl("scale", "spool", "both", f"--replicas={figure}", f"--namespace={home.pools}")
    cluster.wait_for(lambda: pool.scaling["reason"] == "ConflictingManager")
    assert "kubectl writes spec.replicas" in pool.scaling["message"]
    cluster.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={path}")
    seen = cluster.get("spool", "both", f"--namespace={home.pools}", "--show-managed-fields")
    assert scale_writers(seen) == ("kubectl",)
    path.write_text(json.dumps(manifest | {"spec": manifest["spec"] | {"replicas": 4}}))
    cluster.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={path}")
    cluster.wait_for(lambda: pool.scaling["reason"] == "HoldingStaleAdvice")
    assert (pool.desired, pool.pods) == (2, 2)


def test_without_autoscaling_the_newest_replicas_of_a_person_count(cluster: Cluster, home: OperatorNamespaces) -> None:
    pool = PoolSeen(home, "manual")
    cluster.apply(home.pool("manual", replicas=1))
    cluster.wait_for(lambda: pool.pods == 1)
    cluster.kubectl("scale", "spool", "manual", "--replicas=3", f"--namespace={home.pools}")
    cluster.wait_for(lambda: (pool.desired, pool.pods) == (3, 3))
    assert (pool.scaling["status"], pool.scaling["reason"]) == ("False", "ScalingDisabled")


@pytest.fixture
def scheduler(cluster: Cluster, home: OperatorNamespaces) -> Iterator[str]:
    """A real scheduler. Its Unix socket can be reached from every network."""
    address = f"unix:{home.folder}/scheduler.sock"
    env = {
        "MOTET_DATA_DIR": str(home.folder / "scheduler"),
        "MOTET_SCHEDULER_ADDRESS": address,
        "MOTET_SUPERVISOR_ADDRESS": f"unix:{home.folder}/nobody.sock",
        "MOTET_METRICS_ADDRESS": f"unix:{home.folder}/metrics.sock",
        "MOTET_TIME_SCALE": "0.05",
    }
    command = [sys.executable, "-P", "-m", "motet_scheduler"]
    log = home.folder / "scheduler.log"
    socket = home.folder / "scheduler.sock"
    with Program(command, log, cluster.network or Network(), socket.exists, env={**os.environ, **env}):
        yield address


async def test_a_held_request_brings_the_first_pod_and_its_absence_takes_it_away(
    cluster: Cluster, home: OperatorNamespaces, scheduler: str
) -> None:
    pool = PoolSeen(home, "sleepy")
    scaling = builtin(0, 2, scaleDownStabilizationSeconds=1)
    cluster.apply(home.pool("sleepy", replicas=0, autoscaling=scaling))
    await asyncio.to_thread(cluster.wait_for, lambda: pool.scaling["reason"] == "HoldingStaleAdvice")
    async with fake_gateway("g0", scheduler=scheduler) as gateway:
        await asyncio.to_thread(cluster.wait_for, lambda: pool.scaling["reason"] == "FollowingDemand")
        assert (pool.desired, pool.pods) == (0, 0)
        held = scheduler_pb2.Held(groups=[scheduler_pb2.HeldGroup(group=f"{home.pools}/sleepy", requests=1)])
        await until(lambda: gateway.link.send(scheduler_pb2.ServeUp(held=held)))
        await asyncio.to_thread(cluster.wait_for, lambda: (pool.desired, pool.pods) == (1, 1))
        # Just after its start, the scheduler counts the first pod as a runner that served before the start.
        await asyncio.to_thread(cluster.wait_for, lambda: "gateways hold 1 request" in pool.scaling["message"])
        gateway.link.send(scheduler_pb2.ServeUp(held=scheduler_pb2.Held()))
        await asyncio.to_thread(cluster.wait_for, lambda: (pool.desired, pool.pods) == (0, 0))
    await asyncio.to_thread(cluster.wait_for, lambda: pool.scaling["reason"] == "HoldingStaleAdvice")
    assert "no gateway is connected" in pool.scaling["message"]
