"""The operator on a real API server while it is idle, replaced or killed at any moment; and what it must not change."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import pytest

from testbed.cluster.cluster import Cluster
from testbed.cluster.operators import OperatorNamespaces, OperatorProcess, definition_gone, site
from testbed.last_seen import MAX_SEEN, shortened
from tests.kube.proxy import proxy
from tests.kube.replay import Scenario, killed, reason, undisturbed
from tests.kube.site_state import Object, SiteState

pytestmark = pytest.mark.kube


@pytest.fixture
def home(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorNamespaces]:
    with cluster.inside(), site(cluster, tmp_path_factory.mktemp("lives")) as made:
        yield made


def writes(home: OperatorNamespaces) -> list[str]:
    """The operator's writes so far, from the audit log, without renewals of the Lease."""
    return [
        f"{entry['verb']} {entry['requestURI']} {entry['responseStatus']['code']}"
        for entry in home.cluster.audit(home.user)
        if entry["verb"] in ("create", "update", "patch", "delete") and entry["objectRef"]["resource"] != "leases"
    ]


def lists(home: OperatorNamespaces) -> int:
    """The number of times that the operator has listed all adapters."""
    mine = home.cluster.audit(home.user)
    return sum(entry["verb"] == "list" and entry["objectRef"]["resource"] == "loraadapters" for entry in mine)


def settled(
    home: OperatorNamespaces, operator: OperatorProcess, *, quiet_s: float = 1.5, within_s: float = 40
) -> list[str]:
    """All writes, once the operator has listed everything and has written nothing for a while."""
    # Wait for its first round: a replica is ready before it leads, and writes nothing until it leads.
    home.cluster.wait_for(lambda: operator.metric("motet_reconciles_total") >= 1, "the first round", within_s=within_s)
    deadline, before, since = time.monotonic() + within_s, writes(home), time.monotonic()
    while time.monotonic() - since < quiet_s:
        assert time.monotonic() < deadline, f"still writing: {before[-5:]}"
        time.sleep(0.2)
        if (now := writes(home)) != before:
            before, since = now, time.monotonic()
    return before


def test_when_nothing_changes_nothing_is_written_and_a_restart_writes_nothing_either(
    cluster: Cluster, home: OperatorNamespaces
) -> None:
    tenant = home.tenant()

    def nobody_else() -> bool:
        """What earlier tests left may still be ending, and its statuses are written."""
        found = [*cluster.items("loraadapters", "--all-namespaces"), *cluster.items("spool", "--all-namespaces")]
        return not found

    cluster.wait_for(nobody_else, "the objects of other tests to be gone", within_s=60)
    cluster.apply(home.pool(replicas=2), *(home.adapter(f"quiet-{number}", tenant) for number in range(5)))
    quick = {"MOTET_CLUSTER_RESYNC_SECONDS": "20"}
    with OperatorProcess(home, lease=True, env=quick) as operator:
        cluster.wait_for(lambda: home.ready_reason("lora", "quiet-4", tenant) == "WaitingForRunner")
        before = settled(home, operator)
        rounds, seen = operator.metric("motet_reconciles_total"), lists(home)
        # Five resyncs, watches that are opened again, and a round.
        cluster.wait_for(lambda: lists(home) >= seen + 5, "five more lists", within_s=60)
        cluster.wait_for(lambda: operator.metric("motet_reconciles_total") > rounds, "a round", within_s=60)
        assert writes(home) == before
        writes_what_is_new(home, operator, tenant)
        before = settled(home, operator)
    with OperatorProcess(home, lease=True, env=quick) as again:
        assert settled(home, again) == before
        writes_what_is_new(home, again, tenant)


def writes_what_is_new(home: OperatorNamespaces, operator: OperatorProcess, tenant: str) -> None:
    """Check that this operator leads and writes. Otherwise a test that expects no writes would prove nothing."""
    assert operator.metric("motet_operator_leader") == 1
    name, before = f"new-{len(writes(home))}", operator.metric("motet_kubernetes_writes_total")
    home.cluster.apply(home.adapter(name, tenant))
    home.cluster.wait_for(lambda: home.ready_reason("lora", name, tenant) == "WaitingForRunner")
    assert operator.metric("motet_kubernetes_writes_total") > before


def test_objects_of_tenants_are_not_changed(cluster: Cluster, home: OperatorNamespaces) -> None:
    tenant = home.tenant()
    cluster.apply(home.pool(), home.adapter("plain", tenant))
    with OperatorProcess(home):
        cluster.wait_for(lambda: home.ready_reason("lora", "plain", tenant))
        cluster.wait_for(lambda: home.ready_reason("spool", "demo", home.pools))
    for where in (("lora", "plain", tenant), ("spool", "demo", home.pools)):
        it = cluster.get(*where[:2], f"--namespace={where[2]}", "--show-managed-fields")
        assert "finalizers" not in it["metadata"]
        assert "annotations" not in it["metadata"]
        ours = [entry for entry in it["metadata"]["managedFields"] if entry["manager"].startswith("motet-")]
        assert [(entry["manager"], entry["subresource"]) for entry in ours] == [("motet-status", "status")]


@pytest.mark.parametrize("polite", [True, False], ids=["asked to stop", "killed"])
def test_another_replica_takes_over(cluster: Cluster, home: OperatorNamespaces, polite: bool) -> None:
    tenant = home.tenant()
    with (
        OperatorProcess(home, "one", lease=True, port=9091) as one,
        OperatorProcess(home, "other", lease=True, port=9092) as other,
    ):
        # A replica is ready before it leads.
        leading = lambda: [replica for replica in (one, other) if replica.metric("motet_operator_leader")]  # noqa: E731
        (leader,) = cluster.wait_for(leading, "a leader")
        standby = other if leader is one else one
        cluster.apply(home.adapter("before", tenant, "nowhere"))
        cluster.wait_for(lambda: home.ready_reason("lora", "before", tenant))
        assert standby.metric("motet_kubernetes_writes_total") == 0
        (leader.program.stop if polite else leader.program.kill)()
        cluster.apply(home.adapter("after", tenant, "nowhere"))
        cluster.wait_for(lambda: home.ready_reason("lora", "after", tenant), within_s=10)
        assert standby.metric("motet_operator_leader") == 1
        lease = cluster.get("lease", "motet-operator", f"--namespace={home.home}")
        assert lease["spec"]["holderIdentity"].startswith(standby.name)


def test_a_pool_that_shrinks_loses_the_newest_and_one_that_changes_gets_another_deployment(
    cluster: Cluster, home: OperatorNamespaces
) -> None:
    where = (f"--namespace={home.pools}", "--selector=motet.dev/pool=demo")
    quick = {"replicas": 1, "drainTimeoutSeconds": 1}

    def pods() -> list[str]:
        """Pods that are not ending. Make them ready, as a kubelet would: no kubelet runs here."""
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

    with OperatorProcess(home):
        cluster.apply(home.pool(**quick))
        (oldest,) = cluster.wait_for(pods)
        time.sleep(1.1)  # timestamps have whole seconds
        cluster.kubectl("scale", "spool/demo", where[0], "--replicas=3")
        cluster.wait_for(lambda: len(pods()) == 3)
        cluster.wait_for(lambda: home.ready_reason("spool", "demo", home.pools) == "AllRunnersReady")
        cluster.kubectl("scale", "spool/demo", where[0], "--replicas=1")
        cluster.wait_for(lambda: pods() == [oldest], "only the oldest runner")
        (first,) = cluster.items("deployments", *where)
        cluster.apply(home.pool(engine={"maxLoraRank": 8}, **quick))
        cluster.wait_for(lambda: pods() and oldest not in pods(), "the new revision alone")
        cluster.wait_for(lambda: len(cluster.items("deployments", *where)) == 1)
        (second,) = cluster.items("deployments", *where)
        assert second["metadata"]["uid"] != first["metadata"]["uid"]

    upgraded(home)
    with OperatorProcess(home):
        cluster.wait_for(lambda: pods() and images() == ["motet/runner:next"], "the platform's new template alone")
        cluster.kubectl("delete", "spool", "demo", where[0])
        cluster.wait_for(lambda: not cluster.items("deployments", *where))


def upgraded(home: OperatorNamespaces) -> None:
    """Change the platform's template."""
    home.template.write_text(home.template.read_text().replace("motet/runner:test", "motet/runner:next"))


def test_an_operator_goes_on_with_the_template_that_it_started_with(cluster: Cluster, home: OperatorNamespaces) -> None:
    """If an upgrade fails, the operator before it continues. It must not read the template of the upgrade."""
    with OperatorProcess(home) as operator:
        cluster.apply(home.pool())
        cluster.wait_for(lambda: home.ready_reason("spool", "demo", home.pools))
        (before,) = cluster.wait_for(lambda: cluster.items("deployments", f"--namespace={home.pools}"))
        upgraded(home)
        began = operator.metric("motet_reconciles_total")
        # Changes for which the operator uses the template again.
        for replicas in (2, 3):
            cluster.apply(home.pool(replicas=replicas))
            where = ("deployment", before["metadata"]["name"], f"--namespace={home.pools}")
            cluster.wait_for(lambda: cluster.get(*where)["spec"]["replicas"] == replicas)  # noqa: B023
            time.sleep(0.6)
        assert operator.metric("motet_reconciles_total") > began
        (after,) = cluster.items("deployments", f"--namespace={home.pools}")
        assert after["spec"]["template"] == before["spec"]["template"]


def test_another_version_of_the_operator_restarts_no_runner(cluster: Cluster, home: OperatorNamespaces) -> None:
    where = f"--namespace={home.pools}"
    other = home.folder / "other"
    metadata = other / "motet-99.0.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: motet\nVersion: 99.0.0\n")
    env = {"PYTHONPATH": os.pathsep.join((str(other), os.environ.get("PYTHONPATH", "")))}
    asked = [sys.executable, "-P", "-c", "from importlib.metadata import version; print(version('motet'))"]
    assert subprocess.check_output(asked, env=os.environ | env, text=True).strip() == "99.0.0"

    with OperatorProcess(home):
        cluster.apply(home.pool(replicas=2))
        cluster.wait_for(lambda: len(cluster.items("pods", where)) == 2)
        cluster.wait_for(lambda: cluster.get("spool", "demo", where)["status"]["updateRevision"])
    before = cluster.items("deployments,pods,poddisruptionbudgets", where)
    with OperatorProcess(home, env=env):
        # It runs a round and does what the manifest says.
        cluster.apply(home.pool(replicas=3))
        cluster.wait_for(lambda: len(cluster.items("pods", where)) == 3)
    after = {one["metadata"]["uid"]: one for one in cluster.items("deployments,pods,poddisruptionbudgets", where)}
    assert [one["metadata"]["name"] for one in before if one["metadata"]["uid"] not in after] == []
    assert len([one for one in after.values() if one["kind"] == "Deployment"]) == 1


def test_adapters_are_kept_when_their_definition_is_deleted_and_made_again(
    cluster: Cluster, home: OperatorNamespaces
) -> None:
    """Row 13: the operator does not end, keeps the adapters, and watches the kind again when it exists again."""
    tenant = home.tenant()
    env = {"MOTET_CLUSTER_RESYNC_SECONDS": "20", "MOTET_CLUSTER_VANISHED_SECONDS": "12000"}  # ten minutes of real time

    def alone() -> bool:
        """The operator knows only this adapter. Adapters of earlier tests may still be ending."""
        found = cluster.items("loraadapters", "--all-namespaces")
        return len(found) == operator.metric("motet_declared_objects", kind="LoRAAdapter") == 1

    with OperatorProcess(home, env=env) as operator:
        cluster.apply(home.adapter("kept", tenant, "nowhere"))
        cluster.wait_for(lambda: home.ready_reason("lora", "kept", tenant))
        cluster.wait_for(alone, "the adapters of other tests to be gone", within_s=60)
        with definition_gone(cluster):
            log = operator.program.log
            cluster.wait_for(lambda: "kind_vanished" in log.read_text(), "the log event kind_vanished")
            rounds = operator.metric("motet_reconciles_total")
            cluster.wait_for(lambda: operator.metric("motet_reconciles_total") >= rounds + 2, "another round")
            assert operator.metric("motet_declared_objects", kind="LoRAAdapter") == 1, "it is kept"
        cluster.apply(home.adapter("again", tenant, "nowhere"))
        cluster.wait_for(lambda: home.ready_reason("lora", "again", tenant))
        assert operator.metric("motet_declared_objects", kind="LoRAAdapter") == 2, "one that comes ends no other"
        operator.program.assert_alive()


def flows(home: OperatorNamespaces, pools: list[str], adapters: int, runners: int) -> list[Scenario]:
    """Changes of pools and adapters by the platform team and tenants, from none to none. Every fourth adapter names a
    pool that does not exist."""
    cluster = home.cluster
    tenants = [home.tenant(f"tenant-{number}") for number in range(2)]
    named = {
        f"adapter-{number}": (tenants[number % 2], "nowhere" if number % 4 == 3 else pools[number % len(pools)])
        for number in range(adapters)
    }
    known = [name for name, (_, pool) in named.items() if pool != "nowhere"]
    suspended, deleted = known[: max(1, adapters // 3)], known[-max(1, adapters // 4) :]

    def pools_are(replicas: int, **spec: Any) -> None:
        cluster.apply(*(home.pool(name, replicas=replicas, drainTimeoutSeconds=1, **spec) for name in pools))

    def adapters_are(names: Iterable[str], **spec: Any) -> None:
        cluster.apply(*(home.adapter(name, *named[name], **spec) for name in names))

    def created() -> None:
        pools_are(runners)
        adapters_are(named)

    def gone(names: Iterable[str]) -> None:
        for name in names:
            cluster.kubectl("delete", "lora", name, f"--namespace={named[name][0]}")

    def serve(replicas: int) -> Callable[[SiteState], bool]:
        """Each pool has `replicas` runners, all of its newest revision, and none is ending."""

        def reached(world: SiteState) -> bool:
            found = world("servingpools")
            newest = {(one["metadata"]["name"], one.get("status", {}).get("updateRevision")) for one in found}
            pods = [one["metadata"] for one in world("pods")]
            sets = [one["metadata"] for one in world("deployments")]
            labels = [(one["labels"]["motet.dev/pool"], one["labels"]["motet.dev/revision"]) for one in (*pods, *sets)]
            return (
                all(reason(one) == "AllRunnersReady" for one in found)
                and all(one["status"]["readyReplicas"] == one["status"]["replicas"] == replicas for one in found)
                and (len(pods), len(sets)) == (replicas * len(pools), len(pools))
                and set(labels) == newest
                and all(reason(one) in ("Checking", "PoolNotFound", "Suspended") for one in world("loraadapters"))
            )

        return reached

    def adapters_say(number: int, condition: str, **reasons: int) -> Callable[[SiteState], bool]:
        """There are `number` adapters. The given number of them has each of these reasons. Each pool counts its own."""

        def reached(world: SiteState) -> bool:
            found = world("loraadapters")
            said = Counter(reason(one, condition) for one in found)
            registered = sum(one["status"]["adapters"]["registered"] for one in world("servingpools"))
            return (
                (len(found), said[""]) == (number, 0)
                and all(said[each] == count for each, count in reasons.items())
                and registered == sum(reason(one, "Accepted") == "Valid" for one in found)
            )

        return reached

    def nothing_runs(world: SiteState) -> bool:
        """Kubernetes deletes what pools own, in any order."""
        return not any(map(world, ("pods", "deployments", "poddisruptionbudgets")))

    left = adapters - len(deleted)
    return [
        Scenario("creation", created, serve(runners), runners),
        Scenario("more runners", lambda: pools_are(runners + 2), serve(runners + 2), runners + 2),
        Scenario("fewer runners", lambda: pools_are(runners), serve(runners), runners + 2),
        Scenario("a new revision", lambda: pools_are(runners, engine={"maxLoraRank": 8}), serve(runners), runners + 1),
        Scenario(
            "suspension",
            lambda: adapters_are(suspended, suspend=True),
            adapters_say(adapters, "Ready", Suspended=len(suspended)),
            runners,
        ),
        Scenario("adapters deleted", lambda: gone(deleted), adapters_say(left, "Ready"), runners),
        Scenario(
            "pools deleted",
            lambda: cluster.kubectl("delete", "spool", *pools, f"--namespace={home.pools}"),
            lambda world: nothing_runs(world) and adapters_say(left, "Accepted", PoolNotFound=left)(world),
            runners,
        ),
        Scenario("the rest", lambda: gone(set(named) - set(deleted)), lambda world: not world("loraadapters"), 0),
    ]


def unequal(found: Object, expected: Object) -> str:
    """The parts of it that differ, for the one line that a build server shows."""
    parts = [part for part in expected if found.get(part) != expected[part]]
    each = MAX_SEEN // (2 * len(parts) or 1)
    return "; ".join(
        f"{part}: {shortened(str(only_in(found[part], expected[part])), each)}, and undisturbed "
        f"{shortened(str(only_in(expected[part], found[part])), each)}"
        for part in parts
    )


def only_in(these: list[Object], those: list[Object]) -> list[Object]:
    return [one for one in these if one not in those]


@pytest.mark.parametrize(
    ("pools", "adapters", "runners", "crashes"),
    [
        pytest.param(["one"], 4, 1, 26, id="30", marks=pytest.mark.timeout(900)),  # on a machine that is busy
        pytest.param(
            ["one", "two", "three", "four"], 72, 2, 200, id="200", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]
        ),
    ],
)
def test_row_1_an_operator_that_dies_after_every_write_reaches_the_same_result(  # noqa: PLR0917
    cluster: Cluster,
    home: OperatorNamespaces,
    pools: list[str],
    adapters: int,
    runners: int,
    crashes: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After the same changes, an operator that died after any write has the same result as one that never died, and
    nothing is created twice."""
    doing = flows(home, pools, adapters, runners)
    expected = undisturbed(cluster, home, doing)
    lives = 0
    with proxy(cluster, home.kubeconfig) as door, closing(killed(home, door, doing, expected)) as outcomes:
        for flow, alone, outcome in zip(doing, expected, outcomes, strict=True):
            with capsys.disabled():
                print(f"\n  {flow.name}: {outcome} (undisturbed: {alone.writes.total()})", end="")
            assert outcome.state == alone.state, f"{flow.name}: the state, {unequal(outcome.state, alone.state)}"
            makers = shortened(f"{outcome.makers}, and undisturbed {alone.makers}")
            assert outcome.made == alone.made, f"{flow.name}: what was created: {makers}"
            known = unequal(outcome.told, alone.told)
            assert outcome.told == alone.told, f"{flow.name}: what the scheduler knows, {known}"
            assert outcome.writes.total() == outcome.lives, f"{flow.name}: writes and deaths, {outcome.writes}"
            lives += outcome.lives
    assert lives >= crashes
