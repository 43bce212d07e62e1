"""Faults between the operator and the API server, each by its number in docs/reliability.md. Timers at a twentieth."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from motet_operator.cluster.kinds import WATCHED
from testbed.cluster.cluster import Cluster
from testbed.cluster.operators import (
    LEASE_SECONDS,
    POOL_RULES,
    TIME_SCALE,
    OperatorNamespaces,
    OperatorProcess,
    role,
    site,
)
from tests.kube.proxy import Proxy, proxy, status

pytestmark = pytest.mark.kube

WATCHES = len(WATCHED)
"""The watches of an operator with pools in one namespace."""

QUICK_RESYNC = {"MOTET_CLUSTER_RESYNC_SECONDS": "40"}
"""Two seconds of real time."""

LASTING_WATCHES = {"MOTET_TIME_SCALE": "1"}
"""Watches are not opened again within a test: a new watch would show the event that the old one has lost."""


@pytest.fixture(scope="module")
def home(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorNamespaces]:
    with cluster.inside(), site(cluster, tmp_path_factory.mktemp("faults")) as made:
        yield made


@pytest.fixture
def door(cluster: Cluster, home: OperatorNamespaces) -> Iterator[Proxy]:
    with proxy(cluster, home.kubeconfig) as made:
        yield made


@pytest.fixture
def operator(home: OperatorNamespaces, door: Proxy) -> Iterator[OperatorProcess]:
    with OperatorProcess(home, kubeconfig=door.kubeconfig, env=QUICK_RESYNC) as running:
        yield running


def sees_changes(home: OperatorNamespaces, tenant: str, name: str, *, within_s: float = 30) -> None:
    home.cluster.apply(home.adapter(name, tenant, pool="nowhere"))
    home.cluster.wait_for(
        lambda: home.ready_reason("lora", name, tenant) == "PoolNotFound", f"a status of {name}", within_s=within_s
    )


@pytest.mark.parametrize(
    ("how", "seconds", "scale"),
    [
        ("down", 60, TIME_SCALE),
        ("silent", 60, TIME_SCALE),
        *(
            pytest.param(how, 600, 1.0, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])
            for how in ("down", "silent")
        ),
    ],
)
def test_row_2_an_api_server_that_is_away_for_long_is_waited_for(
    home: OperatorNamespaces, door: Proxy, how: str, seconds: float, scale: float
) -> None:
    tenant = home.tenant(f"away-{seconds:.0f}-{how}")
    env = QUICK_RESYNC | {"MOTET_TIME_SCALE": str(scale)}
    with OperatorProcess(home, kubeconfig=door.kubeconfig, env=env, lease=True) as operator:
        sees_changes(home, tenant, "before")
        term = home.lease_term()
        setattr(door.faults, how, True)
        began = time.monotonic()
        while time.monotonic() - began < seconds * scale:
            operator.program.assert_alive()
            time.sleep(0.2)
        setattr(door.faults, how, False)
        sees_changes(home, tenant, "after", within_s=60)
        assert home.lease_term() == term, "it is the same leader"


def test_row_3_a_silent_watch_is_opened_again(cluster: Cluster, home: OperatorNamespaces, door: Proxy) -> None:
    tenant = home.tenant("silence")
    with OperatorProcess(home, kubeconfig=door.kubeconfig, env={"MOTET_CLUSTER_RESYNC_SECONDS": "4000"}) as operator:
        cluster.wait_for(lambda: door.watches == WATCHES)
        sees_changes(home, tenant, "while-it-speaks")
        door.mute_watches()
        sees_changes(home, tenant, "while-it-is-silent", within_s=75 * TIME_SCALE + 8)
        assert operator.metric("motet_watch_cache_repairs_total") == 0  # a watch reported it, not a resync


def test_row_3_how_long_a_watch_has_been_silent_is_a_metric(
    cluster: Cluster, home: OperatorNamespaces, door: Proxy
) -> None:
    tenant = home.tenant("ages")
    env = LASTING_WATCHES | {"MOTET_CLUSTER_RESYNC_SECONDS": "4000"}
    with OperatorProcess(home, kubeconfig=door.kubeconfig, env=env) as operator:

        def age() -> float:
            return operator.metric("motet_watch_age_seconds", resource="/apis/motet.dev/v1alpha1/loraadapters")

        cluster.wait_for(lambda: door.watches == WATCHES)
        time.sleep(3)
        sees_changes(home, tenant, "heard")
        cluster.wait_for(lambda: age() < 2, "a fresh event on the watch")
        door.mute_watches()
        since = time.monotonic()
        time.sleep(3)
        cluster.apply(home.adapter("unheard", tenant, pool="nowhere"))
        time.sleep(2)
        assert age() > time.monotonic() - since - 1.5  # it is updated every second


@pytest.mark.parametrize("code", [410, 429, 500, 504])
def test_row_4_an_error_on_a_watch_is_followed_by_a_new_one(
    cluster: Cluster, home: OperatorNamespaces, door: Proxy, code: int
) -> None:
    tenant = home.tenant("errors")
    cluster.apply(home.pool("steady", replicas=1))
    where = (f"--namespace={home.pools}", "--selector=motet.dev/pool=steady")
    env = LASTING_WATCHES | {"MOTET_CLUSTER_RESYNC_SECONDS": "4000"}
    with OperatorProcess(home, kubeconfig=door.kubeconfig, env=env) as operator:
        cluster.wait_for(lambda: cluster.items("deployments", *where))
        uids = [one["metadata"]["uid"] for one in cluster.items("deployments", *where)]
        cluster.wait_for(lambda: door.watches == WATCHES)
        # A client that keeps them gets no event for more than a minute.
        said = {"type": "ERROR", "object": status(code, "Expired")[1]}
        assert door.say_on_watches(said, last=True) == WATCHES
        cluster.wait_for(lambda: door.watches == WATCHES, "new watches")
        repaired = operator.metric("motet_watch_cache_repairs_total")
        sees_changes(home, tenant, f"after-{code}")
        assert operator.metric("motet_watch_cache_repairs_total") == repaired  # a watch reported it, not a resync
        assert [one["metadata"]["uid"] for one in cluster.items("deployments", *where)] == uids


@pytest.mark.parametrize("lost", ["ADDED", "MODIFIED", "DELETED"])
def test_row_5_an_event_that_never_came_is_made_up_for(
    cluster: Cluster, home: OperatorNamespaces, door: Proxy, lost: str
) -> None:
    env = LASTING_WATCHES | {"MOTET_CLUSTER_RESYNC_SECONDS": "2"}
    repair = {"ADDED": "added", "MODIFIED": "changed", "DELETED": "removed"}[lost]
    with OperatorProcess(home, kubeconfig=door.kubeconfig, env=env) as operator:
        _lose_an_event(cluster, home, door, lost)
        cluster.wait_for(
            lambda: operator.metric("motet_watch_cache_repairs_total", resource="loraadapters", repair=repair),
            "the repair",
        )


def _lose_an_event(cluster: Cluster, home: OperatorNamespaces, door: Proxy, lost: str) -> None:
    tenant = home.tenant("missed")
    name = f"missed-{lost.lower()}"
    cluster.wait_for(lambda: door.watches == WATCHES)  # a list after the event would contain it
    if lost != "ADDED":
        sees_changes(home, tenant, name)
    door.faults.event = lambda path, event: (
        not (event["type"] == lost and event["object"].get("metadata", {}).get("name") == name)
    )
    match lost:
        case "ADDED":
            sees_changes(home, tenant, name)
        case "MODIFIED":
            cluster.apply(home.adapter(name, tenant, pool="nowhere", suspend=True))
            cluster.wait_for(lambda: home.ready_reason("lora", name, tenant) == "Suspended")
        case "DELETED":
            cluster.kubectl("delete", "lora", name, f"--namespace={tenant}")


def test_row_5_a_deleted_pool_gets_no_deployment_again_while_its_deletion_is_not_known(
    cluster: Cluster, home: OperatorNamespaces, door: Proxy
) -> None:
    """The watch of pools is behind that of Deployments. The test deletes the Deployment itself: for a minute or two
    after a kind is new, Kubernetes does not delete what its objects own."""
    where = (f"--namespace={home.pools}", "--selector=motet.dev/pool=brief")

    def made() -> list[str]:
        return [one.path for one in door.writes() if one.status == 201 and "/deployments/brief-" in one.path]

    with OperatorProcess(home, kubeconfig=door.kubeconfig, env=LASTING_WATCHES) as operator:
        cluster.apply(home.pool("brief"))
        cluster.wait_for(lambda: cluster.items("pods", *where), "a runner")
        cluster.wait_for(lambda: home.ready_reason("spool", "brief", home.pools))
        assert len(made()) == 1
        door.faults.event = lambda path, event: event["type"] != "DELETED" or "/servingpools" not in path
        tries = "motet_kubernetes_writes_total"
        before = operator.metric(tries, write="deployment", outcome="gone")
        cluster.kubectl("delete", "spool", "brief", where[0])
        cluster.kubectl("delete", "deployments", *where)
        cluster.wait_for(
            lambda: operator.metric(tries, write="deployment", outcome="gone") > before, "an attempt to make it again"
        )
        cluster.wait_for(lambda: not cluster.items("pods", *where), "the end of its pods")
        assert len(made()) == 1, made()
        assert cluster.items("deployments", *where) == []


def test_row_9_conflicts_on_every_other_write_lose_nothing(
    cluster: Cluster, home: OperatorNamespaces, door: Proxy, operator: OperatorProcess
) -> None:
    dice = random.Random(9)
    asked: Counter[str] = Counter()
    refused: Counter[str] = Counter()

    def answer(method: str, path: str) -> tuple[int, dict[str, object]] | None:
        if method != "PATCH" or "/events" in path:
            return None
        asked[path] += 1
        if dice.random() < 0.5:
            return None
        refused[path] += 1
        return dice.choice([status(409, "Conflict"), status(422, "Invalid")])

    def made(pool: str) -> dict[str, object]:
        """The objects and statuses that the operator has written for a pool, without the pool's name."""
        where = (f"--namespace={home.pools}", f"--selector=motet.dev/pool={pool}")
        cluster.wait_for(lambda: len(cluster.items("pods", *where)) == 2)
        for name in names:
            cluster.wait_for(lambda: home.ready_reason("lora", f"{name}-{pool}", tenant) == "WaitingForRunner")  # noqa: B023
        (deployment,) = cluster.items("deployments", *where)
        objects = {
            "deployment": {part: deployment["spec"][part] for part in ("replicas", "strategy", "template")},
            "budget": cluster.get("pdb", pool, f"--namespace={home.pools}")["spec"],
            "pool": cluster.get("spool", pool, f"--namespace={home.pools}")["status"],
            "adapters": [cluster.get("lora", f"{name}-{pool}", f"--namespace={tenant}")["status"] for name in names],
        }
        return _lasting(objects, {pool: "POOL", deployment["metadata"]["labels"]["motet.dev/revision"]: "REVISION"})  # type: ignore[no-any-return]

    def ask_for(pool: str) -> None:
        adapters = (home.adapter(f"{name}-{pool}", tenant, pool) for name in names)
        cluster.apply(home.pool(pool, replicas=2), *adapters)

    tenant, names = home.tenant("conflicts"), [f"it-{number}" for number in range(10)]
    door.faults.answer = answer
    ask_for("contended")
    cluster.wait_for(lambda: made("contended"))
    door.faults.answer = lambda method, path: None
    ask_for("peaceful")

    def the_same() -> bool:
        assert made("contended") == made("peaceful")
        return True

    cluster.wait_for(the_same, "the same as without conflicts")
    assert refused.total() > 5
    # One more attempt follows each refusal. Each object has a few requests more, because it changed meanwhile.
    assert all(asked[path] - refused[path] <= 10 for path in asked), asked


def _lasting(it: Any, names: dict[str, str]) -> Any:
    """The object without fields that differ between two pools or change with time."""
    if isinstance(it, dict):
        passing = ("lastTransitionTime", "observedGeneration", "pod-template-hash")
        return {key: _lasting(value, names) for key, value in it.items() if key not in passing}
    if isinstance(it, list):
        return [_lasting(one, names) for one in it]
    if isinstance(it, str):
        for name, instead in names.items():
            it = it.replace(name, instead)
    return it


def test_row_10_the_operator_pauses_when_the_server_asks_for_it_and_loses_nothing(
    cluster: Cluster, home: OperatorNamespaces, door: Proxy, operator: OperatorProcess
) -> None:
    asked: list[float] = []
    pause_s = 2.0

    def answer(method: str, path: str) -> tuple[int, dict[str, object]] | None:
        if method != "PATCH" or "/status" not in path:
            return None
        asked.append(time.monotonic())
        code, said = status(429, "TooManyRequests")
        return (code, said | {"details": {"retryAfterSeconds": pause_s}}) if len(asked) == 1 else None

    door.faults.answer = answer
    tenant = home.tenant("pause")
    names = [f"paused-{number}" for number in range(5)]
    cluster.apply(*(home.adapter(name, tenant, "nowhere") for name in names))
    for name in names:
        cluster.wait_for(lambda name=name: home.ready_reason("lora", name, tenant) == "PoolNotFound")
    under_way = [at for at in asked if at - asked[0] < 0.5]  # they were sent before the first answer
    assert min(at for at in asked if at not in under_way) - asked[0] >= pause_s - 0.1


def test_row_12_a_missing_permission_is_named_and_nothing_restarts_when_it_is_back(
    cluster: Cluster, home: OperatorNamespaces, operator: OperatorProcess
) -> None:
    crippled = [
        {**rule, "verbs": [verb for verb in rule["verbs"] if verb not in ("create", "patch")]}
        if rule["resources"] == ["deployments"]
        else rule
        for rule in POOL_RULES
    ]
    cluster.apply(role(home, crippled))
    cluster.apply(home.pool("forbidden"))
    cluster.wait_for(lambda: home.ready_reason("spool", "forbidden", home.pools) == "PermissionDenied")
    ready = home.conditions("spool", "forbidden", home.pools)["Ready"]
    assert "may not patch deployments.apps in namespace" in ready["message"]

    def told() -> list[str]:
        events = cluster.items("events", f"--namespace={home.pools}")
        return [one["message"] for one in events if one["reason"] == "PermissionDenied"]

    cluster.wait_for(told)
    cluster.apply(role(home, POOL_RULES))
    where = (f"--namespace={home.pools}", "--selector=motet.dev/pool=forbidden")
    cluster.wait_for(lambda: cluster.items("deployments", *where))
    cluster.wait_for(lambda: home.ready_reason("spool", "forbidden", home.pools) == "RunnersStarting")
    operator.program.assert_alive()


def test_row_14_a_namespace_goes_whether_or_not_an_operator_runs(
    cluster: Cluster, home: OperatorNamespaces, door: Proxy
) -> None:
    kubeconfig = door.kubeconfig
    for running in (True, False):
        tenant = home.tenant(f"going-{running}".lower())
        operator = OperatorProcess(home, kubeconfig=kubeconfig, env=QUICK_RESYNC)
        with operator:
            sees_changes(home, tenant, "leaving")
            if not running:
                operator.program.kill()
            cluster.kubectl("delete", "namespace", tenant, "--timeout=30s")
    with OperatorProcess(home, kubeconfig=kubeconfig, env=QUICK_RESYNC) as operator:
        assert not [one for one in cluster.items("lora", "-A") if one["metadata"]["name"] == "leaving"]
        operator.program.assert_alive()


def test_row_35_the_older_of_two_adapters_keeps_its_name_and_tenants_are_separate(
    cluster: Cluster, home: OperatorNamespaces, operator: OperatorProcess
) -> None:
    one, other = home.tenant("one"), home.tenant("other")
    cluster.apply(home.pool("names"))
    cluster.apply(home.adapter("first", one, "names", modelName="twin"))
    time.sleep(1.1)  # timestamps have whole seconds
    cluster.apply(home.adapter("a-second", one, "names", modelName="twin"))
    cluster.apply(home.adapter("elsewhere", other, "names", modelName="twin"))
    cluster.wait_for(lambda: home.ready_reason("lora", "a-second", one) == "NameConflict")
    for name, tenant in (("first", one), ("elsewhere", other)):
        cluster.wait_for(
            lambda name=name, tenant=tenant: home.conditions("lora", name, tenant)["Accepted"]["status"] == "True"
        )
    assert cluster.get("lora", "elsewhere", f"--namespace={other}")["status"]["modelName"] == f"{other}/twin"
    cluster.kubectl("delete", "lora", "first", f"--namespace={one}")
    cluster.wait_for(lambda: home.conditions("lora", "a-second", one)["Accepted"]["status"] == "True")


def test_row_8_a_leader_that_was_frozen_past_its_lease_writes_nothing_afterwards(
    cluster: Cluster, home: OperatorNamespaces
) -> None:
    tenant = home.tenant("frozen")
    with (
        proxy(cluster, home.kubeconfig, 6445) as its,
        OperatorProcess(home, "old-leader", lease=True, kubeconfig=its.kubeconfig, port=9091) as old,
    ):
        sees_changes(home, tenant, "by-the-old")
        with OperatorProcess(home, "new-leader", lease=True, port=9092) as new:
            old.program.pause()
            cluster.wait_for(lambda: new.metric("motet_operator_leader") == 1, "a new leader")
            sees_changes(home, tenant, "by-the-new")
            woken = time.monotonic()
            old.program.resume()
            sees_changes(home, tenant, "after-both")
            cluster.wait_for(lambda: has_ended(old), "the end of the old leader")
            assert its.writes(since=woken, leases=True) == []
            new.program.assert_alive()


def test_a_leader_whose_renewals_are_lost_writes_nothing_and_ends_when_another_leads(
    cluster: Cluster, home: OperatorNamespaces
) -> None:
    """It can reach everything except its Lease, so it knows what should be written."""
    tenant = home.tenant("unsure")
    with (
        proxy(cluster, home.kubeconfig, 6445) as its,
        OperatorProcess(home, "old-leader", lease=True, kubeconfig=its.kubeconfig, port=9091) as old,
    ):
        sees_changes(home, tenant, "while-sure")
        its.faults.answer = lambda _, path: status(503, "ServiceUnavailable") if "/leases" in path else None
        time.sleep(LEASE_SECONDS * TIME_SCALE)
        unsure = time.monotonic()
        waiting = old.metric("motet_kubernetes_write_queue_depth")
        cluster.apply(home.adapter("while-unsure", tenant, pool="nowhere"))
        cluster.wait_for(lambda: old.metric("motet_kubernetes_write_queue_depth") > waiting, "a write that waits")
        assert its.writes(since=unsure) == []
        old.program.assert_alive()
        with OperatorProcess(home, "new-leader", lease=True, port=9092):
            sees_changes(home, tenant, "while-unsure")
            its.faults.answer = lambda *_: None
            cluster.wait_for(lambda: has_ended(old), "the end of the old leader")
            assert its.writes(since=unsure, leases=True) == []


def has_ended(operator: OperatorProcess) -> bool:
    try:
        operator.program.assert_alive()
    except AssertionError:
        return True
    return False
