"""What we know too little of stays as it is: pools that cannot be seen, and objects that cannot be read."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from motet.domain import ObjectName
from motet_operator.cluster.decision import Decider, Decision, SchedulerReports
from motet_operator.cluster.kinds import Object
from motet_operator.cluster.obstacles import Obstacle, Obstacles
from motet_operator.cluster.writes import PodAnnotationWrite, ScaleWrite, StatusWrite, Write
from motet_operator.reconcile import ScalingAdvice
from motet_operator.sync import UnhealthyRunner
from tests.operator.cluster.objects import PLATFORM, adapter, deployment, namespace, pod, pool, snapshot

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
DEMO = ObjectName("pools", "demo")
NO_RIGHT = Obstacle("PermissionDenied", "the operator may not list pods in namespace pools")
IN_THE_DARK = Obstacles(unseen_namespaces=frozenset({"pools"}), forbidden_namespaces={"pools": NO_RIGHT})


class OperatorUnderTest:
    """The decisions of one operator since its start."""

    def __init__(self) -> None:
        self.decider = Decider(["pools", "others"], timedelta(seconds=5))
        self.version = 100

    def decide(
        self, *objects: Object, obstacles: Obstacles | None = None, reports: SchedulerReports | None = None
    ) -> Decision:
        found = snapshot(*objects)
        return self.decider.decide(
            found, reports or SchedulerReports(), PLATFORM, NOW, obstacles=obstacles or Obstacles()
        )

    def with_statuses(self, *objects: Object) -> list[Object]:
        """The objects with the statuses that they get."""
        written = statuses(self.decide(*objects))
        return [self.now(it, status=written.get(name(it), it.get("status", {}))) for it in objects]

    def now(self, it: Object, **changed: Any) -> Object:
        self.version += 1
        metadata = it["metadata"] | {"resourceVersion": str(self.version)}
        if "spec" in changed:
            metadata["generation"] += 1
        return it | {"metadata": metadata} | changed


def name(it: Object) -> tuple[str, str]:
    return it["kind"], it["metadata"]["name"]


def statuses(decision: Decision) -> dict[tuple[str, str], Object]:
    return {
        (write.kind.name, write.object[1]): write.status
        for write in decision.writes.values()
        if isinstance(write, StatusWrite)
    }


def reasons(status: Object) -> dict[str, str]:
    return {one["type"]: one["reason"] for one in status["conditions"]}


def children(decision: Decision) -> list[Write]:
    return [write for write in decision.writes.values() if not isinstance(write, StatusWrite)]


def served(decision: Decision) -> list[str]:
    return sorted(each.name.name for each in decision.plan.catalog.adapters)


def tenants(decision: Decision) -> list[tuple[str, ...]]:
    return [each.tenants for each in decision.plan.catalog.pools]


def from_the_future(operator: OperatorUnderTest, it: Object) -> Object:
    return operator.now(it, spec=it["spec"] | {"fromTheFuture": True})


def revision(it: Object) -> str:
    (status,) = OperatorUnderTest().decide(it).plan.pools
    return status.revision


# ------------------------------------------------------------------------------------------------------ what is unseen


def test_runners_that_cannot_be_listed_stay_and_their_adapters_are_served() -> None:
    """As after a start without the right to look: what there is seems to be nothing."""
    before = OperatorUnderTest()
    name = revision(pool())
    known = before.with_statuses(pool(), adapter(), deployment(name, 1), pod("one", name), namespace("tenant"))[:2]
    decision = OperatorUnderTest().decide(*known, namespace("tenant"), obstacles=IN_THE_DARK)
    assert children(decision) == []
    assert served(decision) == ["legal"]
    assert [each.pool for each in decision.plan.catalog.pools] == [DEMO]


def test_known_runners_that_cannot_be_listed_are_not_drained_replaced_or_retired() -> None:
    name = revision(pool())
    one, two, other = pod("one", name), pod("two", name), pod("three", "r1", pool="deleted")
    hung = SchedulerReports(unhealthy={"one": UnhealthyRunner("incarnation", "hangs", NOW - timedelta(hours=1))})
    objects = (pool(replicas=0), deployment(name, 2), one, two, deployment("r1", 1, pool="deleted"), other)
    assert {write.key.what for write in children(OperatorUnderTest().decide(*objects, reports=hung))} > {"mark"}
    decision = OperatorUnderTest().decide(*objects, reports=hung, obstacles=IN_THE_DARK)
    assert children(decision) == []
    assert decision.plan.drains == ()
    staying = (pool(replicas=2), deployment(name, 2), one, two)
    assert OperatorUnderTest().decide(*staying, reports=hung).plan.replacements != ()
    assert OperatorUnderTest().decide(*staying, reports=hung, obstacles=IN_THE_DARK).plan.replacements == ()


def test_a_drain_continues_while_runners_cannot_be_listed() -> None:
    name = revision(pool())
    until = NOW + timedelta(seconds=30)
    leaving = pod("one", name, annotations={"motet.dev/draining-until": until.isoformat()})
    decision = OperatorUnderTest().decide(pool(replicas=0), deployment(name, 1), leaving, obstacles=IN_THE_DARK)
    assert [(drain.instance, drain.deadline) for drain in decision.plan.drains] == [("one", until)]
    assert children(decision) == []


def test_a_drain_is_not_cancelled_while_runners_cannot_be_listed() -> None:
    name = revision(pool())
    leaving = pod("one", name, annotations={"motet.dev/draining-until": (NOW + timedelta(seconds=30)).isoformat()})
    found = (pool(replicas=1), deployment(name, 1), leaving)
    assert OperatorUnderTest().decide(*found).drains == ()
    decision = OperatorUnderTest().decide(*found, obstacles=IN_THE_DARK)
    assert [drain.instance for drain in decision.drains] == ["one"]
    assert children(decision) == []


def test_a_pool_that_cannot_be_listed_gets_one_condition_and_keeps_its_status() -> None:
    name = revision(pool())
    operator = OperatorUnderTest()
    it, *_ = operator.with_statuses(pool(), deployment(name, 1), pod("one", name))
    assert it["status"]["readyReplicas"] == 1
    decision = OperatorUnderTest().decide(it, obstacles=IN_THE_DARK)
    (write,) = [each for each in decision.writes.values() if isinstance(each, StatusWrite)]
    assert reasons(write.status) | {"Ready": NO_RIGHT.reason, "Stalled": NO_RIGHT.reason} == reasons(write.status)
    assert [event.message for event in write.events] == [NO_RIGHT.message]
    assert {key for key in it["status"] if it["status"][key] != write.status[key]} == {"conditions"}
    assert OperatorUnderTest().decide(operator.now(it, status=write.status), obstacles=IN_THE_DARK).writes == {}


def test_a_namespace_that_was_never_listed_has_no_obstacle() -> None:
    unasked = Obstacles(unseen_namespaces=frozenset({"pools"}))
    decision = OperatorUnderTest().decide(pool(), pool("elsewhere", "others"), obstacles=unasked)
    assert statuses(decision).keys() == {("ServingPool", "elsewhere")}
    assert {write.key.object[0] for write in children(decision)} == {"others"}


def test_an_adapter_does_not_wait_for_a_runner_that_only_cannot_be_listed() -> None:
    name = revision(pool())
    operator = OperatorUnderTest()
    it, legal, *_ = operator.with_statuses(
        pool(), adapter(), deployment(name, 1), pod("one", name), namespace("tenant")
    )
    new = adapter("new")
    found = statuses(OperatorUnderTest().decide(it, legal, new, namespace("tenant"), obstacles=IN_THE_DARK))
    assert found.keys() == {("ServingPool", "demo"), ("LoRAAdapter", "new")}
    wrong = operator.now(legal, spec=legal["spec"] | {"poolRef": {"name": "nowhere"}})
    found = statuses(OperatorUnderTest().decide(it, wrong, namespace("tenant"), obstacles=IN_THE_DARK))
    assert reasons(found["LoRAAdapter", "legal"])["Ready"] == "PoolNotFound"


# -------------------------------------------------------------------------------------------------- what is unreadable


def test_a_pool_that_became_unreadable_continues_unchanged_with_a_condition() -> None:
    name = revision(pool())
    operator = OperatorUnderTest()
    it, legal, *rest = operator.with_statuses(
        pool(replicas=2), adapter(), deployment(name, 2), pod("one", name), pod("two", name), namespace("tenant")
    )
    odd = from_the_future(operator, it)
    decision = operator.decide(odd, legal, *rest)
    assert served(decision) == ["legal"]
    assert [write for write in children(decision) if isinstance(write, ScaleWrite | PodAnnotationWrite)] == []
    found = statuses(decision)
    assert found.keys() == {("ServingPool", "demo")}
    status = found["ServingPool", "demo"]
    assert reasons(status) | {"Accepted": "Unreadable", "Ready": "Unreadable"} == reasons(status)
    assert reasons(status)["Available"] == "RunnersReady"
    changed = {key for key in it["status"] | status if it["status"].get(key) != status.get(key)}
    assert changed == {"conditions", "observedGeneration"}
    # It is scaled on, from where it is.
    assert operator.decide(operator.now(odd, status=status), legal, *rest).writes.keys() == decision.writes.keys() - {
        write.key for write in decision.writes.values() if isinstance(write, StatusWrite)
    }


def test_scaling_of_an_unreadable_pool_continues_from_its_current_number() -> None:
    operator = OperatorUnderTest()
    it = pool(autoscaling={"mode": "Builtin", "minReplicas": 1, "maxReplicas": 9})
    (it,) = operator.with_statuses(it)
    odd = from_the_future(operator, it)

    def scaled(reports: SchedulerReports, it: Object) -> Object:
        return operator.now(it, status=statuses(operator.decide(it, reports=reports))["ServingPool", "demo"])

    (first,) = [write for write in operator.decide(odd).writes.values() if isinstance(write, StatusWrite)]
    assert [event.reason for event in first.events] == ["Unreadable"]
    odd = operator.now(odd, status=first.status)
    five = SchedulerReports(advice={DEMO: ScalingAdvice(replicas=5, code="", reason="", stale=False)})
    (second,) = [
        write for write in operator.decide(odd, reports=five).writes.values() if isinstance(write, StatusWrite)
    ]
    assert second.events == ()  # it has been told
    more = scaled(five, odd)
    assert more["status"]["desiredReplicas"] == 5
    lost = operator.decide(
        more, reports=SchedulerReports(advice={DEMO: ScalingAdvice(replicas=1, code="", reason="", stale=True)})
    )
    assert [pool.replicas for pool in lost.plan.catalog.pools] == [5]


def test_after_a_restart_a_partly_readable_pool_serves_the_same_adapters() -> None:
    """As after a rollback: nobody here has ever read it whole."""
    name = revision(pool())
    operator = OperatorUnderTest()
    objects = (pool(), adapter(), deployment(name, 1), pod("one", name), namespace("tenant"))
    it, legal, *rest = operator.with_statuses(*objects)
    assert legal["status"]["baseModel"]
    odd = from_the_future(operator, it)
    hung = SchedulerReports(unhealthy={"one": UnhealthyRunner("incarnation", "hangs", NOW - timedelta(hours=1))})
    again = OperatorUnderTest()
    decision = again.decide(odd, legal, adapter("new"), *rest, reports=hung)
    assert served(decision) == ["legal"]  # the other one may be what the unknown field forbids
    assert children(decision) == []
    assert decision.plan.drains == ()
    found = statuses(decision)
    assert ("LoRAAdapter", "new") not in found
    status = found["ServingPool", "demo"]
    assert {key for key in it["status"] if it["status"][key] != status[key]} == {"conditions", "observedGeneration"}
    assert reasons(status)["Ready"] == "Unreadable"
    # Also after another start, when that is what its status says.
    later = OperatorUnderTest().decide(operator.now(odd, status=status), legal, *rest)
    assert served(later) == ["legal"]
    assert not statuses(later).keys() & {("ServingPool", "demo")}


ALLOWED: list[dict[str, Any]] = [
    {"from": "All"},
    {"from": "Selector", "selector": {}},
    {"from": "Selector", "selector": {"matchLabels": {"tier": "paid"}}},
    {"from": "Same"},
]


@pytest.mark.parametrize("allowed", ALLOWED)
def test_a_partly_readable_pool_admits_no_new_namespace(allowed: dict[str, Any]) -> None:
    """As after a rollback: the unknown field may be what keeps tenants out."""
    namespaces = [namespace(name, tier="paid") for name in ("tenant", "pools", "stranger")]
    operator = OperatorUnderTest()
    own = adapter("own", "pools", poolRef={"name": "demo"})
    it, *known = operator.with_statuses(pool(allowedNamespaces=allowed), adapter(), own, *namespaces)
    accepted = tuple(sorted(one["metadata"]["namespace"] for one in known[:2] if one["status"].get("baseModel")))
    assert accepted
    odd = operator.now(it, spec=it["spec"] | {"allowedNamespaces": allowed | {"except": ["stranger"]}})
    new = adapter("new", "stranger", share=["*"])
    assert tenants(OperatorUnderTest().decide(odd, *known, new)) == [accepted]
    assert tenants(OperatorUnderTest().decide(odd, new, *namespaces)) == [()]
    # Who has read it before goes by that.
    assert tenants(operator.decide(odd, *known)) == tenants(operator.decide(it, *known))


def test_a_partly_readable_pool_stops_serving_namespaces_it_no_longer_admits() -> None:
    """What is understood counts too, also of a pool that is understood in part."""
    operator = OperatorUnderTest()
    it, *known = operator.with_statuses(pool(), adapter(), namespace("tenant"))
    odd = operator.now(it, spec=it["spec"] | {"allowedNamespaces": {"from": "Same", "except": []}})
    assert tenants(OperatorUnderTest().decide(odd, *known)) == [()]


def test_an_unreadable_pool_does_not_affect_others() -> None:
    operator = OperatorUnderTest()
    it, other = operator.with_statuses(pool(), pool("other"))
    assert sorted(tenants(OperatorUnderTest().decide(from_the_future(operator, it), other))) == [(), ("*",)]


def test_an_unreadable_adapter_is_still_served_if_it_was() -> None:
    operator = OperatorUnderTest()
    it, legal, tenant = operator.with_statuses(pool(), adapter(), namespace("tenant"))
    odd = from_the_future(operator, legal)
    assert served(operator.decide(it, odd, tenant)) == ["legal"]
    restarted = OperatorUnderTest()
    decision = restarted.decide(it, odd, from_the_future(operator, adapter("new")), tenant)
    assert served(decision) == ["legal"]
    found = statuses(decision)["LoRAAdapter", "legal"]
    assert reasons(found)["Ready"] == "Unreadable"
    assert served(OperatorUnderTest().decide(it, operator.now(odd, status=found), tenant)) == ["legal"]
    was = {"source": "file:///a", "verdict": "Serving", "time": "2026-01-01T00:00:00Z"}
    before = operator.now(odd, status=odd["status"] | {"revisions": [was]})
    found = statuses(OperatorUnderTest().decide(it, before, tenant))["LoRAAdapter", "legal"]
    assert found["revisions"] == [was]


def test_an_adapter_that_is_readable_again_follows_its_spec() -> None:
    operator = OperatorUnderTest()
    it, legal, tenant = operator.with_statuses(pool(), adapter(), namespace("tenant"))
    operator.decide(it, from_the_future(operator, legal), tenant)
    assert served(operator.decide(it, operator.now(legal, spec=legal["spec"] | {"suspend": True}), tenant)) == []


def test_a_recreated_object_inherits_nothing() -> None:
    operator = OperatorUnderTest()
    it, _, tenant = operator.with_statuses(pool(), adapter(), namespace("tenant"))
    other = from_the_future(operator, adapter())
    other["metadata"]["uid"] = "another"
    assert served(operator.decide(it, other, tenant)) == []


def test_a_completely_unreadable_pool_keeps_its_runners_and_its_status() -> None:
    name = revision(pool())
    operator = OperatorUnderTest()
    it, one, runner = operator.with_statuses(pool(), deployment(name, 1), pod("one", name))
    odd = operator.now(it, spec={"model": {"uri": 7}})
    decision = OperatorUnderTest().decide(odd, one, runner)
    assert children(decision) == []
    assert decision.plan.drains == ()
    status = statuses(decision)["ServingPool", "demo"]
    assert {key for key in it["status"] if it["status"][key] != status[key]} == {"conditions", "observedGeneration"}
