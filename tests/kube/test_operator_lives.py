"""The operator's own lives on a real API server: idle, replaced, killed at any moment; and what it must not touch."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.kube.cluster import Cluster
from tests.kube.operators import Operator, Site, apply_definitions, site
from tests.kube.proxy import Seen, proxy

pytestmark = pytest.mark.kube


@pytest.fixture
def home(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with cluster.inside(), site(cluster, tmp_path_factory.mktemp("lives")) as made:
        yield made


def writes(home: Site) -> list[str]:
    """Of the operator so far, by the audit log; Lease renewals aside."""
    return [
        f"{entry['verb']} {entry['requestURI']} {entry['responseStatus']['code']}"
        for entry in home.cluster.audit(home.user)
        if entry["verb"] in ("create", "update", "patch", "delete") and entry["objectRef"]["resource"] != "leases"
    ]


def settled(home: Site, operator: Operator, *, quiet_s: float = 1.5, within_s: float = 40) -> list[str]:
    """All writes, once none has come for a while after it has looked around."""
    # A replica is ready before it leads: it has not written anything then because it has not begun.
    home.cluster.wait_for(lambda: operator.metric("motet_reconciles_total") >= 1, "the first round", within_s=within_s)
    deadline, before, since = time.monotonic() + within_s, writes(home), time.monotonic()
    while time.monotonic() - since < quiet_s:
        assert time.monotonic() < deadline, f"still writing: {before[-5:]}"
        time.sleep(0.2)
        if (now := writes(home)) != before:
            before, since = now, time.monotonic()
    return before


def test_when_nothing_changes_nothing_is_written_and_a_restart_writes_nothing_either(
    cluster: Cluster, home: Site
) -> None:
    tenant = home.tenant()
    cluster.apply(home.pool(replicas=2), *(home.adapter(f"quiet-{number}", tenant) for number in range(5)))
    quick = {"MOTET_CLUSTER_RESYNC_SECONDS": "20"}
    with Operator(home, lease=True, env=quick) as operator:
        cluster.wait_for(lambda: home.ready_reason("lora", "quiet-4", tenant) == "WaitingForRunner")
        before = settled(home, operator)
        rounds = operator.metric("motet_reconciles_total")
        time.sleep(5)  # five lists of everything, and watches that come and go
        assert writes(home) == before
        assert operator.metric("motet_reconciles_total") >= rounds
    with Operator(home, lease=True, env=quick):
        time.sleep(3)
        assert writes(home) == before


def test_what_belongs_to_tenants_is_left_as_they_made_it(cluster: Cluster, home: Site) -> None:
    tenant = home.tenant()
    cluster.apply(home.pool(), home.adapter("plain", tenant))
    with Operator(home):
        cluster.wait_for(lambda: home.ready_reason("lora", "plain", tenant))
    for where in (("lora", "plain", tenant), ("spool", "demo", home.pools)):
        it = cluster.get(*where[:2], f"--namespace={where[2]}", "--show-managed-fields")
        assert "finalizers" not in it["metadata"]
        assert "annotations" not in it["metadata"]
        ours = [entry for entry in it["metadata"]["managedFields"] if entry["manager"].startswith("motet-")]
        assert [(entry["manager"], entry["subresource"]) for entry in ours] == [("motet-status", "status")]


@pytest.mark.parametrize("polite", [True, False], ids=["asked to stop", "killed"])
def test_another_replica_takes_over(cluster: Cluster, home: Site, polite: bool) -> None:
    tenant = home.tenant()
    with Operator(home, "one", lease=True, port=9091) as one, Operator(home, "other", lease=True, port=9092) as other:
        # Both are ready, and one leads.
        (leader,) = [replica for replica in (one, other) if replica.metric("motet_operator_leader")]
        standby = other if leader is one else one
        cluster.apply(home.adapter("before", tenant, "nowhere"))
        cluster.wait_for(lambda: home.ready_reason("lora", "before", tenant))
        assert standby.metric("motet_writes_total") == 0
        (leader.program.stop if polite else leader.program.kill)()
        cluster.apply(home.adapter("after", tenant, "nowhere"))
        cluster.wait_for(lambda: home.ready_reason("lora", "after", tenant), within_s=10)
        assert standby.metric("motet_operator_leader") == 1
        lease = cluster.get("lease", "motet-operator", f"--namespace={home.home}")
        assert lease["spec"]["holderIdentity"].startswith(standby.name)


def test_a_pool_that_shrinks_loses_the_newest_and_one_that_changes_gets_another_deployment(
    cluster: Cluster, home: Site
) -> None:
    where = (f"--namespace={home.pools}", "--selector=motet.dev/pool=demo")
    quick = {"replicas": 1, "drainTimeoutSeconds": 1}

    def pods() -> list[str]:
        """Those that stay. Nothing runs them here, so they are made ready as a kubelet would."""
        found = [one for one in cluster.items("pods", *where) if "deletionTimestamp" not in one["metadata"]]
        for one in found:
            if not one.get("status", {}).get("containerStatuses"):
                ready = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"}
                ready["containerStatuses"] = [
                    {"name": "runner", "ready": True, "restartCount": 0, "image": "", "imageID": ""}
                ]
                cluster.kubectl(
                    *("patch", "pod", one["metadata"]["name"], where[0], "--subresource=status"),
                    *("--type=merge", f"--patch={json.dumps({'status': ready})}"),
                )
        return [one["metadata"]["name"] for one in found]

    def images() -> list[str]:
        return [
            one["spec"]["template"]["spec"]["containers"][0]["image"] for one in cluster.items("deployments", *where)
        ]

    with Operator(home):
        cluster.apply(home.pool(**quick))
        (oldest,) = cluster.wait_for(pods)
        time.sleep(1.1)  # ages are told apart by the second
        cluster.kubectl("scale", "spool/demo", where[0], "--replicas=3")
        cluster.wait_for(lambda: len(pods()) == 3)
        cluster.wait_for(lambda: home.ready_reason("spool", "demo", home.pools) == "AllRunnersReady")
        cluster.kubectl("scale", "spool/demo", where[0], "--replicas=1")
        cluster.wait_for(lambda: pods() == [oldest], "the oldest alone")
        (first,) = cluster.items("deployments", *where)
        cluster.apply(home.pool(engine={"maxLoraRank": 8}, **quick))
        cluster.wait_for(lambda: pods() and oldest not in pods(), "the new revision alone")
        cluster.wait_for(lambda: len(cluster.items("deployments", *where)) == 1)
        (second,) = cluster.items("deployments", *where)
        assert second["metadata"]["uid"] != first["metadata"]["uid"]
        home.template.write_text(home.template.read_text().replace("motet/runner:test", "motet/runner:next"))
        cluster.wait_for(lambda: pods() and images() == ["motet/runner:next"], "the platform's new template alone")
        cluster.kubectl("delete", "spool", "demo", where[0])
        cluster.wait_for(lambda: not cluster.items("deployments", *where))


def test_adapters_are_kept_when_their_definition_is_deleted_and_made_again(cluster: Cluster, home: Site) -> None:
    """Row 13, as far as the operator goes: it neither ends nor forgets, and watches the kind that has come back."""
    tenant = home.tenant()
    with Operator(home, env={"MOTET_CLUSTER_RESYNC_SECONDS": "20"}) as operator:
        cluster.apply(home.adapter("kept", tenant, "nowhere"))
        cluster.wait_for(lambda: home.ready_reason("lora", "kept", tenant))
        cluster.wait_for(lambda: operator.metric("motet_objects") >= 1)
        known = operator.metric("motet_objects")
        try:
            cluster.kubectl("delete", "crd", "loraadapters.motet.dev", "--timeout=30s")
            time.sleep(3)
            assert operator.metric("motet_objects") == known
        finally:
            apply_definitions(cluster)
        cluster.apply(home.adapter("again", tenant, "nowhere"))
        cluster.wait_for(lambda: home.ready_reason("lora", "again", tenant))
        operator.program.assert_alive()


@pytest.mark.parametrize("crashes", [30, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_row_1_an_operator_that_dies_after_every_single_write_gets_there_all_the_same(
    cluster: Cluster, home: Site, crashes: int
) -> None:
    """Each life writes once. What comes of it is what comes of one undisturbed life."""
    tenants = [home.tenant(f"tenant-{number}") for number in range(3)]
    pools = [home.pool("one", replicas=2), home.pool("two", replicas=1)]
    adapters = [
        home.adapter(f"adapter-{number}", tenants[number % 3], ("one", "two", "nowhere")[number % 3])
        for number in range(crashes)
    ]
    lives = 0
    with proxy(cluster, home.kubeconfig) as door:
        operator = Operator(home, kubeconfig=door.kubeconfig, env={"MOTET_CLUSTER_WRITERS": "1"})
        died = threading.Event()

        def die(seen: Seen) -> None:
            if "/events" not in seen.path and not died.is_set():
                died.set()
                os.kill(operator.program.pid, signal.SIGKILL)

        door.faults.written = die
        cluster.apply(*pools, *adapters)
        while lives < crashes:
            operator.program.start(wait=False)
            died.clear()  # not before: what the life before had under way may still arrive
            if not died.wait(15):
                break  # nothing is left to write
            operator.program.kill()
            lives += 1
        door.faults.written = lambda _: None
        operator.program.kill()
        with operator:
            cluster.wait_for(lambda: len(cluster.items("pods", f"--namespace={home.pools}")) == 3, "the last word")
            final = settled(home, operator)
            deployments = cluster.items("deployments", f"--namespace={home.pools}")
            by_pool = sorted(one["metadata"]["labels"]["motet.dev/pool"] for one in deployments)
            assert by_pool == ["one", "two"]
            assert {one["metadata"]["labels"]["motet.dev/pool"]: one["spec"]["replicas"] for one in deployments} == {
                "one": 2,
                "two": 1,
            }
            assert len(cluster.items("pods", f"--namespace={home.pools}")) == 3
            for it in adapters:
                name, tenant = it["metadata"]["name"], it["metadata"]["namespace"]
                wanted = "PoolNotFound" if it["spec"]["poolRef"]["name"] == "nowhere" else "WaitingForRunner"
                assert home.ready_reason("lora", name, tenant) == wanted
            assert writes(home) == final
    assert lives == crashes
