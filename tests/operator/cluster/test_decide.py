from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from motet.domain import ObjectName
from motet_operator.cluster.cache import Cache
from motet_operator.cluster.decision import NO_OBSTACLES, VANISHED, Decider, Decision, SchedulerReports
from motet_operator.cluster.kinds import ADAPTERS, BUDGETS, DEPLOYMENTS, POOLS, Kind, Object, uid_of
from motet_operator.cluster.obstacles import Obstacle, Obstacles
from motet_operator.cluster.writes import (
    DeploymentDeletion,
    OwnedObjectWrite,
    PodAnnotationWrite,
    PodDeletion,
    ScaleWrite,
    StatusWrite,
)
from motet_operator.reconcile import AdapterReplica, AdapterReport, ScalingAdvice
from motet_operator.sync import UnhealthyRunner
from tests.operator.cluster.objects import PLATFORM, adapter, deployment, namespace, pod, pool, snapshot

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOTHING_SAID = SchedulerReports()
SOON = (NOW + timedelta(seconds=7)).isoformat()
DRAINING = "motet.dev/draining-until"
LEAVES = {"controller.kubernetes.io/pod-deletion-cost": "-1000"}


def decided(
    *objects: Object,
    reports: SchedulerReports = NOTHING_SAID,
    decider: Decider | None = None,
    obstacles: Obstacles = NO_OBSTACLES,
    now: datetime = NOW,
    cordoned: Collection[str] = (),
) -> Decision:
    decider = decider or Decider(["pools"], timedelta(seconds=5))
    return decider.decide(snapshot(*objects), reports, PLATFORM, now, cordoned, obstacles=obstacles)


def of(decision: Decision, kind: Any) -> list:
    return [write for write in decision.writes.values() if isinstance(write, kind)]


def children(decision: Decision, kind: Kind) -> list[OwnedObjectWrite]:
    return [write for write in of(decision, OwnedObjectWrite) if write.kind is kind]


def revision() -> str:
    (status,) = decided(pool()).plan.pools
    return status.revision


def status_of(decision: Decision, kind: object, name: str) -> Mapping[str, object]:
    (write,) = [one for one in of(decision, StatusWrite) if one.kind is kind and one.object[1] == name]
    return write.status


def reason_of(decision: Decision, kind: object, name: str, type_: str = "Ready") -> str:
    return reason_in(status_of(decision, kind, name), type_)


def test_a_new_pool_gets_a_deployment_and_both_kinds_their_status() -> None:
    decision = decided(pool(replicas=2), adapter(), namespace("tenant"))
    (write,) = children(decision, DEPLOYMENTS)
    assert write.initial_fields == {"replicas": 2}
    assert reason_of(decision, POOLS, "demo") == "RunnersStarting"
    assert reason_of(decision, ADAPTERS, "legal") == "WaitingForRunner"
    assert decision.plan.catalog.adapters[0].name == ObjectName("tenant", "legal")


def stored(write: OwnedObjectWrite) -> Object:
    """As the API server has it then."""
    metadata = write.document["metadata"] | {"uid": "b", "resourceVersion": "2", "generation": 1}
    return write.document | {"metadata": metadata, "status": {"currentHealthy": 1, "conditions": []}}


def test_a_second_decision_writes_nothing_again() -> None:
    first = decided(pool(), adapter(), namespace("tenant"))
    (made,) = children(first, DEPLOYMENTS)
    (budget,) = children(first, BUDGETS)
    applied = made.document | {
        "metadata": made.document["metadata"]
        | {
            "uid": "d",
            "resourceVersion": "2",
            "generation": 1,
            "managedFields": [{"manager": each, "operation": "Apply"} for each in ("motet-operator", "motet-scaler")],
        },
        "spec": made.document["spec"] | {"replicas": 1},
    }
    known = [
        it | {"status": status_of(first, kind, it["metadata"]["name"])}
        for kind, it in ((POOLS, pool()), (ADAPTERS, adapter()))
    ]
    guarded = stored(budget)
    assert decided(*known, applied, guarded, namespace("tenant"), now=NOW + timedelta(hours=1)).writes == {}


def member(name: str, model: str, second: int, **status: object) -> Object:
    """A pool of the group g, created in that second."""
    document = pool(name, group="g", model={"uri": "hf://acme/base", "revision": model})
    created = {"creationTimestamp": f"2026-01-01T00:00:{second:02}Z"}
    return document | {"metadata": document["metadata"] | created, "status": status}


def deployed(*pools: Object) -> dict[str, Object]:
    """The Deployment of each pool, as the API server has it once it was made."""
    made = {
        write.document["metadata"]["labels"]["motet.dev/pool"]: write
        for write in children(decided(*pools), DEPLOYMENTS)
    }
    managers = [{"manager": each, "operation": "Apply"} for each in ("motet-operator", "motet-scaler")]
    return {
        name: (it := stored(write))
        | {
            "metadata": it["metadata"] | {"managedFields": managers},
            "spec": it["spec"] | {"replicas": 1},
            "status": {"observedGeneration": 1, "replicas": 1},
        }
        for name, write in made.items()
    }


def revision_in(deployment: Object) -> str:
    return str(deployment["metadata"]["labels"]["motet.dev/revision"])


def test_a_pool_whose_engine_has_no_image_gets_no_deployment() -> None:
    wants = pool("one", engine={"backend": "vllm"})
    decision = decided(wants)
    assert reason_of(decision, POOLS, "one", "Accepted") == "BackendNotInstalled"
    assert children(decision, DEPLOYMENTS) == []


def test_the_deployment_of_a_pool_that_waits_for_its_groups_model_stays_as_it_was_made() -> None:
    leads, follows = member("leads", "v1", 1), member("follows", "v1", 2)
    before = deployed(leads, follows)
    runners = [pod(f"{name}-1", revision_in(it), pool=name) for name, it in before.items()]
    decision = decided(member("leads", "v2", 1, decidesForGroup=True), follows, *before.values(), *runners)
    assert reason_of(decision, POOLS, "follows", "Accepted") == "ModelMismatch"
    kept = {each.revision: each.replicas for each in decision.plan.runner_sets if each.pool.name == "follows"}
    assert kept == {revision_in(before["follows"]): 1}
    written = [write.document["metadata"]["labels"]["motet.dev/pool"] for write in children(decision, DEPLOYMENTS)]
    assert written == ["leads"]
    fewer = follows | {"spec": follows["spec"] | {"replicas": 0}}
    gone = {"annotations": {DRAINING: NOW.isoformat(), **LEAVES}}
    leaving = pod("follows-1", revision_in(before["follows"]), pool="follows", ready=False, **gone)
    asked = decided(member("leads", "v2", 1, decidesForGroup=True), fewer, *before.values(), leaving)
    assert [write.replicas for write in of(asked, ScaleWrite) if "follows" in write.object[1]] == [0], (
        "but it is scaled"
    )


def test_the_deployment_of_a_third_model_that_begins_is_made_from_the_spec() -> None:
    models = [deployed(member("leads", each, 1))["leads"] for each in ("v1", "v2", "v3")]
    runners = [
        pod(
            f"r{second}",
            revision_in(it),
            pool="leads",
            ready=second < 3,
            creationTimestamp=f"2026-01-01T00:01:0{second}Z",
        )
        for second, it in enumerate(models, 1)
    ]
    *others, newest = models
    outdated = newest | {"spec": newest["spec"] | {"revisionHistoryLimit": 2}}
    (write,) = children(decided(member("leads", "v3", 1), *others, outdated, *runners), DEPLOYMENTS)
    assert write.document["spec"] == {key: it for key, it in newest["spec"].items() if key != "replicas"}


def test_an_unreadable_pool_is_refused_in_its_status_and_keeps_its_runners() -> None:
    odd = pool(fromTheFuture=True)
    runner = pod("demo-1", "old")
    decision = decided(odd, runner, deployment("old", 1), adapter("odd", fromTheFuture=True))
    assert reason_of(decision, POOLS, "demo", "Accepted") == "Unreadable"
    assert reason_of(decision, ADAPTERS, "odd", "Accepted") == "Unreadable"
    assert [write for write in decision.writes.values() if not isinstance(write, StatusWrite)] == []


def test_a_pool_with_a_variable_that_is_no_longer_allowed_keeps_serving() -> None:
    """As an upgrade of the operator finds it."""
    variables = [{"name": "LD_PRELOAD", "value": "a"}, {"name": "TZ", "value": "UTC"}, {"name": "PATH", "value": "b"}]
    runner = pod("demo-1", "old")
    decision = decided(pool(template={"env": variables}), runner, deployment("old", 1), adapter(), namespace("tenant"))
    assert reason_of(decision, POOLS, "demo", "Accepted") == "Unreadable"
    assert [write for write in decision.writes.values() if not isinstance(write, StatusWrite)] == []
    assert [one.pool for one in decision.plan.catalog.pools] == [ObjectName("pools", "demo")]
    assert "LD_PRELOAD" not in repr(decision.plan.catalog)


def test_a_new_runner_set_grows_at_once() -> None:
    name = revision()
    decision = decided(pool(replicas=3), deployment(name, 1), pod("one", name))
    (scale,) = of(decision, ScaleWrite)
    assert scale.replicas == 3


def test_a_deployment_of_another_owner_is_ignored_whatever_its_labels() -> None:
    name = revision()
    theirs = deployment("theirs", 5)
    alike = deployment(name, 7)
    alike["metadata"]["name"] = "alike"
    for it in (theirs, alike):
        it["metadata"]["managedFields"] = [{"manager": "kubectl", "operation": "Apply"}]
    decision = decided(pool(), theirs, deployment(name, 1), alike, pod("one", name))
    assert not of(decision, ScaleWrite | DeploymentDeletion)
    assert [each.document["metadata"]["name"] for each in children(decision, DEPLOYMENTS)] == [f"demo-{name}"]


def test_a_pod_of_another_owner_is_not_a_runner_whatever_its_labels() -> None:
    name = revision()
    bare = pod("bare", name, ownerReferences=[])
    of_another = pod("another", name, ownerReferences=[{"kind": "ReplicaSet", "name": "web-6c5", "controller": True}])
    old = pod("old", "r0", ownerReferences=[], deletionTimestamp="2026-01-01T12:00:30Z")
    decision = decided(pool(), deployment(name, 1), pod("one", name), bare, of_another, old)
    assert not of(decision, PodAnnotationWrite | PodDeletion | ScaleWrite)
    assert decision.drains == ()
    assert status_of(decision, POOLS, "demo")["replicas"] == 1


def test_a_pool_that_waits_for_its_turn_keeps_the_deployment_that_it_has_and_scales_it() -> None:
    decider = Decider(["pools"], timedelta(seconds=5), rolling_pools=1)
    rolling = [pool("first"), deployment("old", 1, "first"), pod("first-1", "old", "first")]
    waiting = [pool("second", replicas=2), deployment("old", 1, "second"), pod("second-1", "old", "second")]
    decision = decided(*rolling, *waiting, decider=decider)
    assert [write.document["metadata"]["labels"]["motet.dev/pool"] for write in children(decision, DEPLOYMENTS)] == [
        "first"
    ]
    (scale,) = of(decision, ScaleWrite)
    assert (scale.object, scale.replicas) == (("pools", "second-old"), 2)
    assert reason_of(decision, POOLS, "second", "Progressing") == "WaitingForTurn"
    assert not of(decision, DeploymentDeletion | PodAnnotationWrite | PodDeletion)

    # What keeps its own from being made is what it says first.
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota"}
    waiting[1]["status"]["conditions"] = [failure]
    hindered = decided(*rolling, *waiting, decider=Decider(["pools"], timedelta(seconds=5), rolling_pools=1))
    assert reason_of(hindered, POOLS, "second", "Progressing") == "RunnersRefused"


def test_a_shrinking_deployment_is_drained_then_marked_then_scaled_down() -> None:
    name = revision()
    pods = [pod("one", name, creationTimestamp="2026-01-01T00:00:00Z"), pod("two", name)]
    pods[1]["metadata"]["creationTimestamp"] = "2026-01-01T00:10:00Z"
    first = decided(pool(replicas=1), deployment(name, 2), *pods)
    assert not of(first, ScaleWrite)
    (mark,) = of(first, PodAnnotationWrite)
    assert mark.object == ("pools", "two")
    assert mark.annotations == {DRAINING: (NOW + timedelta(seconds=30)).isoformat()}
    assert first.drains == (), "nobody is told before it is written"

    pods[1]["metadata"]["annotations"] = dict(mark.annotations)
    second = decided(pool(replicas=1), deployment(name, 2), *pods)
    assert [drain.instance for drain in second.drains] == ["two"]
    assert not of(second, ScaleWrite | PodAnnotationWrite)  # it still has requests
    drained = SchedulerReports(drained={"two"})
    third = decided(pool(replicas=1), deployment(name, 2), *pods, reports=drained)
    (mark,) = of(third, PodAnnotationWrite)
    assert mark.annotations == pods[1]["metadata"]["annotations"] | LEAVES
    assert not of(third, ScaleWrite), "the Deployment would not know which"
    pods[1]["metadata"]["annotations"] = dict(mark.annotations)
    last = decided(pool(replicas=1), deployment(name, 2), *pods, reports=drained)
    (scale,) = of(last, ScaleWrite)
    assert scale.replicas == 1
    assert not of(last, PodAnnotationWrite)


def test_a_runner_that_never_served_is_marked_and_removed_without_a_drain() -> None:
    name = revision()
    idle = pod("two", name, ready=False)
    first = decided(pool(replicas=1), deployment(name, 2), pod("one", name), idle)
    (mark,) = of(first, PodAnnotationWrite)
    assert (mark.object, mark.annotations) == (("pools", "two"), LEAVES)
    idle["metadata"]["annotations"] = dict(LEAVES)
    assert of(decided(pool(replicas=1), deployment(name, 2), pod("one", name), idle), ScaleWrite)


def test_a_pod_that_stays_keeps_no_annotation() -> None:
    name = revision()
    for marks in ({DRAINING: "2026-01-01T12:00:30+00:00"}, LEAVES, LEAVES | {DRAINING: "2025-01-01T12:00:30+00:00"}):
        back = pod("two", name, ready=False, annotations=marks | {"example.com/theirs": "stays"})
        decision = decided(pool(replicas=2), deployment(name, 2), pod("one", name), back)
        (mark,) = of(decision, PodAnnotationWrite)
        assert (mark.object, mark.annotations) == (("pools", "two"), {})
        assert decision.drains == ()
        assert not of(decision, ScaleWrite)


def test_a_deletion_cost_that_another_client_set_is_left_alone() -> None:
    name = revision()
    theirs = pod("two", name, annotations={"controller.kubernetes.io/pod-deletion-cost": "7"})
    assert not of(decided(pool(replicas=2), deployment(name, 2), pod("one", name), theirs), PodAnnotationWrite)


def test_nothing_shrinks_while_a_pod_that_stays_is_marked() -> None:
    name = revision()
    leaving = pod("three", name, annotations=LEAVES | {DRAINING: NOW.isoformat()})
    stays = pod("one", name, annotations=LEAVES)
    found = (pool(replicas=2), deployment(name, 3), pod("two", name), leaving)
    decision = decided(*found, stays)
    assert not of(decision, ScaleWrite)
    assert [(mark.object[1], mark.annotations) for mark in of(decision, PodAnnotationWrite)] == [("one", {})]
    assert of(decided(*found, pod("one", name)), ScaleWrite)


def test_a_pod_that_is_being_deleted_takes_no_work_from_then_on() -> None:
    name = revision()
    evicted = pod("two", name, deletionTimestamp="2026-01-01T12:00:50Z")
    decision = decided(pool(replicas=2), deployment(name, 2), pod("one", name), evicted)
    assert [(one.instance, one.deadline) for one in decision.drains] == [("two", NOW + timedelta(seconds=50))]
    evicted["metadata"]["annotations"] = {DRAINING: (NOW + timedelta(seconds=5)).isoformat()}
    decision = decided(pool(replicas=2), deployment(name, 2), pod("one", name), evicted)
    assert [one.deadline for one in decision.drains] == [NOW + timedelta(seconds=5)]
    evicted["status"]["phase"] = "Succeeded"
    assert decided(pool(replicas=2), deployment(name, 2), pod("one", name), evicted).drains == ()


def test_a_pod_that_outlives_its_scale_down_is_deleted() -> None:
    name = revision()
    leaving = pod("two", name, node="node-2", annotations=LEAVES | {DRAINING: NOW.isoformat()})
    strategy = {"maxSurge": 1, "maxUnavailable": 1}
    found = (pool(replicas=2, updateStrategy=strategy), leaving, pod("one", name), pod("three", "old"))
    old = deployment("old", 1)
    assert not of(decided(*found, old, deployment(name, 2, up_to_date=False), cordoned={"node-2"}), PodDeletion)
    # The number is right: another is to take its place.
    (gone,) = of(decided(*found, old, deployment(name, 2), cordoned={"node-2"}), PodDeletion)
    assert (gone.uid, gone.version) == (leaving["metadata"]["uid"], 1)


def test_a_pod_chosen_to_leave_stays_when_another_has_left() -> None:
    name = revision()
    leaving = pod("two", name, annotations=LEAVES | {DRAINING: NOW.isoformat()})
    decision = decided(pool(replicas=1), leaving, deployment(name, 1))
    assert not of(decision, PodDeletion | ScaleWrite)
    assert [mark.annotations for mark in of(decision, PodAnnotationWrite)] == [{}]


def test_a_runner_on_a_cordoned_node_is_replaced_and_then_removed() -> None:
    name = revision()
    here = pod("here", name, node="node-2")
    one = deployment(name, 1)
    assert not of(decided(pool(), one, here, cordoned={"node-1"}), ScaleWrite)
    (grow,) = of(decided(pool(), one, here, cordoned={"node-2"}), ScaleWrite)
    assert grow.replicas == 2

    found = (pool(), deployment(name, 2), here, pod("there", name))
    moving = decided(*found, cordoned={"node-2"})
    assert not of(moving, ScaleWrite)
    (mark,) = of(moving, PodAnnotationWrite)
    assert mark.object == ("pools", "here")
    here["metadata"]["annotations"] = dict(mark.annotations) | LEAVES
    (shrink,) = of(decided(*found, reports=SchedulerReports(drained={"here"}), cordoned={"node-2"}), ScaleWrite)
    assert shrink.replicas == 1


def test_an_eviction_during_a_replacement_leaves_no_extra_runner() -> None:
    name = revision()
    going = pod("here", name, node="node-2", deletionTimestamp="2026-01-01T12:00:00Z")
    (shrink,) = of(decided(pool(), deployment(name, 2), going, pod("there", name), cordoned={"node-2"}), ScaleWrite)
    assert shrink.replicas == 1


def budget_of(*objects: Object) -> dict[str, object]:
    (write,) = children(decided(*objects), BUDGETS)
    assert write.initial_fields == {}
    return write.document["spec"]


def test_a_pool_has_a_budget_that_spares_as_many_runners_as_may_be_missing() -> None:
    (write,) = children(decided(pool(replicas=2)), BUDGETS)
    metadata = write.document["metadata"]
    assert (metadata["namespace"], metadata["name"]) == ("pools", "demo")
    assert metadata["labels"]["motet.dev/pool"] == "demo"
    assert metadata["ownerReferences"][0]["uid"] == "pools/demo"
    assert write.document["spec"] == {
        "minAvailable": 2,
        "selector": {"matchLabels": {"motet.dev/pool": "demo"}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    patient = pool(replicas=1, updateStrategy={"maxUnavailable": 1})
    assert budget_of(patient)["minAvailable"] == 0
    assert budget_of(pool(replicas=0))["minAvailable"] == 0
    assert budget_of(pool(replicas=1, updateStrategy={"maxUnavailable": 3}))["minAvailable"] == 0


def test_a_disruption_budget_follows_its_pool_and_is_restored() -> None:
    (write,) = children(decided(pool()), BUDGETS)
    here = stored(write)
    assert not children(decided(pool(), here), BUDGETS)
    (more,) = children(decided(pool(replicas=3), here), BUDGETS)
    assert more.document["spec"]["minAvailable"] == 3
    assert more.needed(cache_of(here))
    assert not more.needed(cache_of(here | {"spec": here["spec"] | {"minAvailable": 3}}))
    here["spec"] = here["spec"] | {"minAvailable": 0}
    assert budget_of(pool(), here)["minAvailable"] == 1


def cache_of(*objects: Object) -> Cache:
    cache = Cache()
    for it in objects:
        cache.put(BUDGETS, it)
    return cache


def test_a_refused_pool_does_not_delay_a_drain() -> None:
    old = pool("old", group="g")
    young = pool("young", group="g", model={"uri": "hf://acme/other"})
    old["metadata"]["creationTimestamp"] = "2025-01-01T00:00:00Z"
    assert {write.key.object[1] for write in children(decided(old, young), BUDGETS)} == {"old"}
    running = decided(old, young, pod("one", "1", pool="young"))
    found = {write.key.object[1]: write.document["spec"] for write in children(running, BUDGETS)}
    assert found["young"]["minAvailable"] == 0


def test_an_old_revision_without_pods_goes_and_the_newest_stays_even_at_zero() -> None:
    decision = decided(pool(replicas=0), deployment(revision(), 0), deployment("old", 0))
    assert [write.revision for write in of(decision, DeploymentDeletion)] == ["old"]


def failed(it: Object, reason: str = "Evicted", message: str = "The node was low on memory.") -> Object:
    status = {"phase": "Failed", "reason": reason, "message": message, "conditions": it["status"]["conditions"]}
    return it | {"status": status}


def test_failed_pods_keep_no_old_deployment_and_their_reason_is_in_the_pools_condition() -> None:
    ended = [failed(pod(name, "old")) for name in ("one", "two")]
    decision = decided(pool(), *ended, deployment("old", 0))
    assert [write.revision for write in of(decision, DeploymentDeletion)] == ["old"]
    assert "Evicted: The node was low on memory." in str(status_of(decision, POOLS, "demo")["conditions"])
    assert status_of(decision, POOLS, "demo")["replicas"] == 0


def test_a_pod_that_still_ends_keeps_its_deployment() -> None:
    ending = pod("one", "old", deletionTimestamp="2026-01-01T12:00:50Z")
    assert not of(decided(pool(), ending, deployment("old", 0)), DeploymentDeletion)


def test_an_equal_replica_count_is_still_written_to_own_the_field() -> None:
    name = revision()
    (scale,) = of(decided(pool(), deployment(name, 1, ours=False), pod("one", name)), ScaleWrite)
    assert scale.replicas == 1


def test_an_unhealthy_runner_is_deleted_by_its_uid_once_its_grace_is_over() -> None:
    name = revision()
    hung = UnhealthyRunner("incarnation", "hangs", NOW - timedelta(seconds=4))
    found = (pool(), deployment(name, 1), pod("one", name))
    early = decided(*found, reports=SchedulerReports(unhealthy={"one": hung}))
    assert not of(early, PodDeletion)
    assert early.due == 1.0
    late = decided(*found, reports=SchedulerReports(unhealthy={"one": hung}), now=NOW + timedelta(seconds=2))
    assert [write.object for write in of(late, PodDeletion)] == [("pools", "one")]


@pytest.mark.parametrize(
    ("node", "status", "limit"),
    [
        ("", {}, 5),
        ("node-1", {}, 20),
        ("node-1", {"containerStatuses": [{"name": "runner", "state": {"running": {"startedAt": SOON}}}]}, 27),
    ],
    ids=["no node", "its container does not start", "it does not get ready"],
)
def test_a_pod_that_does_not_start_in_time_keeps_no_hung_runner(node: str, status: Object, limit: float) -> None:
    name = revision()
    waiting = pod("new", name, ready=False, node=node, creationTimestamp=NOW.isoformat())
    waiting["status"] |= status
    probe = {"periodSeconds": 2, "failureThreshold": 10}
    waiting["spec"]["containers"] = [{"name": "runner", "startupProbe": probe}]
    found = (pool(replicas=2), deployment(name, 2), pod("one", name), waiting)
    reports = SchedulerReports(unhealthy={"one": UnhealthyRunner("incarnation", "hangs", NOW - timedelta(seconds=9))})
    early = decided(*found, reports=reports)
    assert (of(early, PodDeletion), early.due) == ([], limit)
    late = decided(*found, reports=reports, now=NOW + timedelta(seconds=limit))
    assert [write.object for write in of(late, PodDeletion)] == [("pools", "one")]


def test_the_successor_of_an_unhealthy_runner_is_left_alone() -> None:
    name = revision()
    hung = UnhealthyRunner("incarnation", "hangs", NOW - timedelta(seconds=9))
    again = pod("one", name)
    began = (NOW - timedelta(seconds=1)).isoformat()
    again["status"]["containerStatuses"] = [
        {"name": "runner", "state": {"running": {"startedAt": began}}, "restartCount": 1}
    ]
    found = decided(pool(), deployment(name, 1), again, reports=SchedulerReports(unhealthy={"one": hung}))
    assert not of(found, PodDeletion)


def test_a_missing_right_is_in_the_pools_conditions_and_in_one_event() -> None:
    why = "the operator may not list pods in namespace pools"
    denied = Obstacles(forbidden_namespaces={"pools": Obstacle("PermissionDenied", why)})
    decision = decided(pool(), obstacles=denied)
    assert reason_of(decision, POOLS, "demo") == "PermissionDenied"
    (write,) = [one for one in of(decision, StatusWrite) if one.kind is POOLS]
    assert [event.message for event in write.events] == [why]
    known = pool() | {"status": dict(write.status)}
    assert not of(decided(known, obstacles=denied), StatusWrite)


@pytest.mark.parametrize("kind", [DEPLOYMENTS, BUDGETS])
def test_a_write_refused_by_the_server_is_in_the_pools_condition(kind: Kind) -> None:
    (write,) = children(decided(pool()), kind)
    obstacles = Obstacles(writes={write.key: Obstacle("RunnersRefused", "must have a team label")})
    decision = decided(pool(), pool("other"), obstacles=obstacles)
    for type_ in ("Ready", "Available", "Progressing", "Stalled"):
        assert reason_of(decision, POOLS, "demo", type_) == "RunnersRefused"
    assert reason_of(decision, POOLS, "other") == "RunnersStarting"
    (status,) = [one for one in of(decision, StatusWrite) if one.object[1] == "demo"]
    assert [(event.reason, event.message) for event in status.events] == [("RunnersRefused", "must have a team label")]


def test_pods_that_cannot_be_created_are_in_the_condition_while_the_old_runner_serves() -> None:
    name = revision()
    stuck = deployment(name, 2)
    trouble = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota: gpus"}
    stuck["status"]["conditions"] = [trouble]
    decision = decided(pool(replicas=2), stuck, pod("one", name))
    assert reason_of(decision, POOLS, "demo") == "RunnersRefused"
    assert reason_of(decision, POOLS, "demo", "Available") == "RunnersReady"
    assert "exceeded quota: gpus" in str(status_of(decision, POOLS, "demo")["conditions"])
    enough = decided(pool(replicas=1), stuck, pod("one", name))
    assert reason_of(enough, POOLS, "demo") == "AllRunnersReady"
    trouble["status"] = "False"
    assert reason_of(decided(pool(replicas=2), stuck, pod("one", name)), POOLS, "demo") == "RunnersStarting"


class Before:
    """A pool with a runner that holds an adapter, as the last leader left them."""

    def __init__(self) -> None:
        name = revision()
        self.runner, self.deployment = pod("one", name), deployment(name, 1)
        self.reports = SchedulerReports(
            known={
                ObjectName("tenant", "legal"): AdapterReport(
                    serving_digest=DIGEST, replicas=(AdapterReplica(runner="one", tier="device", digest=DIGEST),)
                )
            },
            advice={ObjectName("pools", "demo"): ScalingAdvice(replicas=1)},
            slots={"one": 16},
        )
        self.pool, self.adapter = pool(autoscaling=BUILTIN), adapter()
        first = self.decided(self.reports)
        self.pool["status"] = status_of(first, POOLS, "demo")
        self.adapter["status"] = status_of(first, ADAPTERS, "legal")
        assert self.written(self.reports) == {}

    def decided(self, reports: SchedulerReports, *without: Object, **changed: Object) -> Decision:
        """Long after, so that no time that has passed explains anything."""
        found = {"pool": self.pool, "adapter": self.adapter, "runner": self.runner} | changed
        there = [it for it in found.values() if it not in without]
        return decided(*there, self.deployment, reports=reports, now=NOW + timedelta(hours=1))

    def written(self, reports: SchedulerReports, *without: Object, **changed: Object) -> dict[Kind, Mapping[str, Any]]:
        return {one.kind: one.status for one in of(self.decided(reports, *without, **changed), StatusWrite)}


BUILTIN = {"mode": "Builtin", "minReplicas": 1, "maxReplicas": 3}
DIGEST = "sha256:" + "0" * 64


GROUP = ObjectName("pools", "demo")
NOT_HEARD_YET = SchedulerReports(reported_groups=(), advice_is_awaited=True)


def test_a_new_leader_writes_nothing_until_the_scheduler_has_reported_all_however_long_that_takes() -> None:
    before = Before()
    assert before.written(NOT_HEARD_YET) == {}
    # The runner is back, and has not been asked yet what it holds.
    assert before.written(replace(before.reports, known={}, reported_groups=())) == {}
    # It says that there is nothing more, but its runners have not come back.
    assert ADAPTERS not in before.written(replace(before.reports, known={}, slots={}))
    found = before.written(replace(before.reports, known={}))
    assert found[ADAPTERS]["loadedReplicas"] == 0
    assert found[POOLS]["slots"]["used"] == 0


def test_a_new_leader_keeps_what_was_reported_group_by_group() -> None:
    before = Before()
    silent = replace(before.reports, known={})
    others = (ObjectName("pools", "another"),)
    assert before.written(replace(silent, reported_groups=others)) == {}
    assert reason_in(before.written(replace(silent, reported_groups=(*others, GROUP)))[ADAPTERS]) == "Checking"


def test_a_new_leader_that_hears_no_scheduler_follows_the_advice_of_before_only_for_a_while() -> None:
    before = Before()
    found = before.written(replace(NOT_HEARD_YET, advice_is_awaited=False))
    assert found.keys() == {POOLS}, "what runners hold has not changed"
    (scaling,) = [one for one in found[POOLS]["conditions"] if one["type"] == "ScalingActive"]
    assert (scaling["status"], scaling["reason"]) == ("Unknown", "HoldingStaleAdvice")
    assert "the scheduler has not reported" in scaling["message"]
    assert found[POOLS]["adapters"]["loaded"] == 1


def test_an_adapter_without_any_runner_is_not_served_although_no_scheduler_says_so() -> None:
    before, awaited = Before(), NOT_HEARD_YET
    found = before.written(awaited, before.runner)[ADAPTERS]
    assert (reason_in(found), reason_in(found, "Loaded")) == ("WaitingForRunner", "WaitingForRunner")
    assert (reason_in(found, "Certified"), found["loadedReplicas"]) == ("FitsBaseModel", 0), "its files are the same"
    asleep = pool(replicas=0) | {"status": before.pool["status"]}
    assert reason_in(before.written(awaited, before.runner, pool=asleep)[ADAPTERS]) == "ScaledToZero"
    failed = AdapterReport(failure_code="adapter_incompatible", failure_reason="ShapeMismatch")
    refused = replace(before.reports, known={ObjectName("tenant", "legal"): failed})
    before.adapter["status"] = before.written(refused)[ADAPTERS]
    assert ADAPTERS not in before.written(awaited, before.runner), "files that were refused are refused"


def test_a_runner_that_is_not_ready_serves_no_adapter_although_no_scheduler_says_so() -> None:
    before = Before()
    starting = pod("one", revision(), ready=False)
    found = before.written(NOT_HEARD_YET, runner=starting)[ADAPTERS]
    assert (reason_in(found), reason_in(found, "Certified")) == ("WaitingForRunner", "FitsBaseModel")


def test_a_new_leader_may_say_the_same_in_other_words() -> None:
    """As after an upgrade of the operator."""
    before = Before()
    accepted = next(one for one in before.adapter["status"]["conditions"] if one["type"] == "Accepted")
    accepted["message"] = "in the words of an earlier version"
    assert before.written(NOT_HEARD_YET) == {}


def test_an_adapter_that_takes_another_name_does_not_take_it_from_the_one_that_has_it() -> None:
    renamed, has_it = adapter("a"), adapter("b", modelName="law")
    renamed["status"], has_it["status"] = (
        status_of(decided(pool(), it), ADAPTERS, it["metadata"]["name"]) for it in (renamed, has_it)
    )
    renamed["spec"] |= {"modelName": "law"}
    renamed["metadata"]["creationTimestamp"] = "2024-01-01T00:00:00Z"
    assert [each.name.name for each in decided(pool(), renamed, has_it).plan.catalog.adapters] == ["b"]


def test_what_needs_no_scheduler_is_written_meanwhile() -> None:
    before, awaited = Before(), NOT_HEARD_YET
    suspended = adapter(suspend=True) | {"status": before.adapter["status"]}
    suspended["metadata"]["generation"] = 2
    assert reason_in(before.written(awaited, adapter=suspended)[ADAPTERS]) == "Suspended"
    assert reason_in(before.written(awaited, before.pool)[ADAPTERS]) == "PoolNotFound"
    assert ADAPTERS in before.written(awaited, adapter=adapter()), "a new one has no status yet"
    unchecked = adapter() | {
        "status": status_of(before.decided(awaited, before.runner, adapter=adapter()), ADAPTERS, "legal")
    }
    assert reason_in(before.written(awaited, adapter=unchecked)[ADAPTERS]) == "Checking", "nothing can be lost"
    found = before.written(awaited, before.runner)[POOLS]
    assert (reason_in(found), found["readyReplicas"]) == ("RunnersStarting", 0)
    assert (found["slots"], found["adapters"]["loaded"]) == ({"total": 16, "used": 1}, 1), "as it was reported last"
    assert reason_in(found, "ScalingActive") == "FollowingDemand"
    fixed = pool() | {"status": before.pool["status"]}
    found = before.written(awaited, before.pool, fixed=fixed, more=adapter("another"))[POOLS]
    assert reason_in(found, "ScalingActive") == "ScalingDisabled"
    assert found["adapters"] == {"registered": 2, "loaded": 0, "failed": 0, "summary": "0/2"}


def test_a_new_leader_may_find_the_status_of_an_earlier_version() -> None:
    theirs = pool(namespace="elsewhere") | {"status": {"replicas": 1}}
    found = decided(theirs, reports=NOT_HEARD_YET)
    assert reason_of(found, POOLS, "demo") == "NamespaceNotPrepared"


def reason_in(status: Mapping[str, Any], type_: str = "Ready") -> str:
    return next(one["reason"] for one in status["conditions"] if one["type"] == type_)


def test_who_decides_is_in_the_status_and_outlives_a_restored_object() -> None:
    """A restored pool or adapter has a new creation time, or by a clock that was wrong an earlier one."""
    pools = [pool("a", group="g"), pool("b", group="g")]
    adapters = [adapter(name, modelName="law", poolRef={"name": "g", "namespace": "pools"}) for name in ("c", "d")]
    for kept in (pools[1], adapters[1]):
        kept["metadata"]["creationTimestamp"] = "2025-01-01T00:00:00Z"
    first = decided(*pools, *adapters)
    assert [status_of(first, POOLS, name)["decidesForGroup"] for name in ("a", "b")] == [False, True]
    assert [reason_of(first, ADAPTERS, name, "Accepted") for name in ("c", "d")] == ["NameConflict", "Valid"]

    pools[1]["status"] = status_of(first, POOLS, "b")
    adapters[1]["status"] = status_of(first, ADAPTERS, "d")
    for restored in (pools[0], adapters[0]):
        restored["metadata"]["creationTimestamp"] = "2024-01-01T00:00:00Z"
    again = decided(*pools, *adapters).plan
    assert [each.decides for each in again.pools] == [False, True]
    assert [each.name.name for each in again.catalog.adapters] == ["d"]


def test_a_new_object_gets_an_event_only_if_it_fails() -> None:
    decision = decided(pool(), adapter(), adapter("lonely", poolRef={"name": "nowhere"}))
    events = {write.object[1]: write.events for write in of(decision, StatusWrite) if write.kind is ADAPTERS}
    assert events["legal"] == ()
    assert [event.reason for event in events["lonely"]] == ["PoolNotFound"]


def test_an_object_that_is_being_deleted_is_not_declared() -> None:
    going = adapter()
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    decision = decided(pool(), going)
    assert decision.plan.catalog.adapters == ()
    assert ADAPTERS not in [write.kind for write in of(decision, StatusWrite)]


def test_a_pool_whose_namespace_was_taken_away_keeps_the_numbers_that_nobody_can_count_any_more() -> None:
    elsewhere = pool(namespace="elsewhere")
    decider = Decider(["pools"], timedelta(seconds=5))
    counts = {"replicas": 3, "readyReplicas": 2, "desiredReplicas": 3, "replicaSummary": "2/3", "decidesForGroup": True}
    available = {"type": "Available", "status": "True", "reason": "RunnersReady", "message": "2 of 3 runners serve"}
    available |= {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
    followed = available | {"type": "ScalingActive", "reason": "FollowingDemand"}
    before = elsewhere | {"status": counts | {"adapters": {"registered": 4}, "conditions": [available, followed]}}
    status: Any = status_of(decided(before, decider=decider), POOLS, "demo")
    assert counts.items() <= status.items()
    assert status["adapters"]["registered"] == 0, "its adapters are not accepted"
    conditions = {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]}
    refused = ("False", "NamespaceNotPrepared")
    assert conditions == {
        **dict.fromkeys(("Available", "Accepted", "Ready", "Progressing", "ScalingActive"), refused),
        "AdaptersHealthy": ("True", "NoneFailed"),
        "Stalled": ("True", "NamespaceNotPrepared"),
    }
    after = elsewhere | {"status": status, "metadata": elsewhere["metadata"] | {"resourceVersion": "2"}}
    assert of(decided(after, decider=decider), StatusWrite) == [], "it is written once"


def test_a_pool_elsewhere_says_how_its_namespace_is_prepared() -> None:
    decision = decided(pool(namespace="elsewhere"))
    assert reason_of(decision, POOLS, "demo") == "NamespaceNotPrepared"
    assert not of(decision, OwnedObjectWrite)


def test_an_adapter_of_a_pool_that_is_not_accepted_says_whom_to_ask_and_no_longer_waits() -> None:
    decider = Decider(["pools"], timedelta(seconds=5))
    theirs = adapter(poolRef={"name": "demo", "namespace": "elsewhere"})
    status: Any = status_of(decided(pool(namespace="elsewhere"), theirs, decider=decider), ADAPTERS, "legal")
    found = {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]}
    assert found["Accepted"] == found["Ready"] == ("False", "PoolNotAccepted")
    assert found["Stalled"] == ("True", "PoolNotAccepted")
    assert "Reconciling" not in found
    (message,) = [one["message"] for one in status["conditions"] if one["type"] == "Accepted"]
    for word in ("elsewhere/demo", "ask the platform team", "pools.namespaces"):
        assert word in message
    closed = pool(namespace="elsewhere", allowedNamespaces={"from": "Same"})
    assert reason_of(decided(closed, theirs, decider=decider), ADAPTERS, "legal") == "NamespaceNotAllowed"
    beside = decided(pool(namespace="elsewhere"), pool("second", group="demo"), adapter(), decider=decider)
    assert reason_of(beside, ADAPTERS, "legal") == "WaitingForRunner", "a group of another namespace"


def test_a_round_without_changes_evaluates_nothing_again() -> None:
    decider = Decider(["pools"], timedelta(seconds=5))
    objects = (pool(), *(adapter(f"a-{number}") for number in range(50)), namespace("tenant"))
    first = decided(*objects, decider=decider)
    again = decided(*objects, decider=decider)
    assert all(a is b for a, b in zip(first.plan.adapters, again.plan.adapters, strict=True))


def test_a_vanished_object_is_served_and_its_status_not_written() -> None:
    decision = decided(pool() | {VANISHED: True}, adapter() | {VANISHED: True}, deployment("old", 0))
    assert [each.name.name for each in decision.plan.catalog.adapters] == ["legal"]
    assert [write for write in decision.writes.values() if not isinstance(write, DeploymentDeletion)] == []


def test_the_catalog_has_the_uids_of_all_namespaces_also_of_those_without_adapters() -> None:
    decision = decided(pool(), namespace("tenant"), namespace("base-only"))
    assert decision.plan.catalog.namespaces == tuple(
        (name, uid_of(namespace(name))) for name in ("base-only", "tenant")
    )
    assert uid_of(namespace("tenant"))
    odd = namespace("tenant")
    odd["metadata"]["labels"] = {"team": 7}
    assert [name for name, _ in decided(odd).plan.catalog.namespaces] == ["tenant"], "whatever its labels"


def test_a_status_counts_as_far_as_it_may() -> None:
    """A group may have several pools of a thousand runners each."""
    name = revision()
    runners = [pod(f"r{index}", name) for index in range(2001)]
    held = AdapterReport(
        serving_digest="d",
        replicas=tuple(AdapterReplica(runner=it["metadata"]["name"], tier="device", digest="d") for it in runners),
    )
    reports = SchedulerReports(known={ObjectName("tenant", "legal"): held})
    decision = decided(pool(replicas=1000), adapter(), deployment(name, 2001), *runners, reports=reports)
    assert status_of(decision, ADAPTERS, "legal")["loadedReplicas"] == 2000
    counts = {"replicas", "stayingReplicas", "readyReplicas", "updatedReplicas"}
    assert {field: status_of(decision, POOLS, "demo")[field] for field in counts} == dict.fromkeys(counts, 2000) | {
        "stayingReplicas": 1000
    }
    (loaded,) = [one for one in decision.plan.adapters[0].conditions if one.type == "Loaded"]
    assert loaded.message == "the adapter is in device memory on 2001 runners"
