"""How runners come and go."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.chat_formats import ChatFormats
from motet.domain import ObjectName
from motet.resources.status import AdapterCounts, Slots
from motet_operator.reconcile import (
    AdapterObject,
    AdapterReplica,
    AdapterReport,
    ExistingSet,
    FailedRunner,
    Plan,
    PoolObject,
    PoolStatus,
    RunnerInstance,
    ScalingAdvice,
    View,
    reconcile,
)
from motet_operator.reconcile.revisions import revision_of, template_of
from tests.operator.builders import DIGEST, NOW, adapter, condition, existing, instance, later, name, pool, sets, view


def revision(of: PoolObject) -> str:
    return revision_of(of.resource.object_name, template_of(of))


def runner_set(of: PoolObject, replicas: int = 1) -> ExistingSet:
    return ExistingSet(
        pool=of.resource.object_name,
        revision=revision(of),
        template=template_of(of),
        replicas=replicas,
        drain_seconds=30,
    )


def test_a_new_pool_gets_its_runners() -> None:
    (only,) = reconcile(view(pools=[pool(replicas=2)])).runner_sets
    assert (only.replicas, only.leaving) == (2, ())


def test_the_same_template_is_the_same_revision() -> None:
    assert revision(pool(replicas=1)) == revision(pool(replicas=5, drainTimeoutSeconds=1))
    assert revision(pool()) == revision(pool(engine={}))
    assert revision(pool()) != revision(pool(engine={"maxLoraRank": 8}))
    assert revision(pool()) != revision(pool(engine={"prefixCache": False}))
    assert revision(pool("a")) != revision(pool("b"))


def test_the_command_line_overrides_every_pools_replicas() -> None:
    plan = reconcile(view(pools=[pool("a", replicas=1), pool("b", replicas=5)], runners_override=2))
    assert [each.replicas for each in plan.runner_sets] == [2, 2]
    assert [each.replicas for each in plan.pools] == [2, 2]


@pytest.mark.parametrize(("of_before", "replicas"), [({}, 1), ({"engine": {"maxLoraRank": 8}}, 3)])
def test_a_pool_takes_no_runner_away_while_one_has_another_template(of_before: dict[str, Any], replicas: int) -> None:
    scaling = {"mode": "Builtin", "minReplicas": 1, "maxReplicas": 3}
    one = replace(pool(autoscaling=scaling), wanted=3)
    before = instance("a", revision(pool(autoscaling=scaling, **of_before)))
    advice = {name("demo"): ScalingAdvice(replicas=1)}
    assert reconcile(view(pools=[one], instances=[before], scaling_advice=advice)).pools[0].replicas == replicas


@pytest.mark.parametrize(("engine", "told"), [({}, 0), ({"maxConcurrentSequences": 7}, 7)])
def test_the_scheduler_is_told_how_many_sequences_a_runner_may_have(engine: dict[str, Any], told: int) -> None:
    (entry,) = reconcile(view(pools=[pool(engine=engine)])).catalog.pools
    assert entry.max_sequences == told


def test_more_replicas_are_added_beside_the_others() -> None:
    one = pool(replicas=3)
    plan = reconcile(view(pools=[one], instances=[instance("a", revision(one))]))
    assert plan.runner_sets[0].replicas == 3
    assert plan.drains == ()


def test_fewer_replicas_drain_the_newest_and_keep_it_until_it_is_empty() -> None:
    one = pool(replicas=1, drainTimeoutSeconds=30)
    two = [instance("old", revision(one), ordinal=1), instance("new", revision(one), ordinal=2)]
    plan = reconcile(view(pools=[one], instances=two))
    (drain,) = plan.drains
    assert (drain.instance, drain.deadline) == ("new", later(30))
    assert (plan.runner_sets[0].replicas, plan.runner_sets[0].leaving) == (2, ())

    two[1] = replace(two[1], draining_until=later(30))
    assert reconcile(view(pools=[one], instances=two)).runner_sets[0].leaving == ()
    for gone in (replace(two[1], drained=True), replace(two[1], draining_until=NOW)):
        plan = reconcile(view(pools=[one], instances=[two[0], gone]))
        assert (plan.runner_sets[0].replicas, plan.runner_sets[0].leaving) == (1, ("new",))


def test_of_several_that_may_leave_the_one_with_the_fewest_requests_does() -> None:
    one = pool(replicas=2)
    three = [instance(text, revision(one), ordinal=number) for number, text in enumerate(("a", "b", "c"))]
    plan = reconcile(view(pools=[one], instances=three, requests={"a": 5, "b": 1, "c": 3}))
    assert [drain.instance for drain in plan.drains] == ["b"]
    plan = reconcile(view(pools=[one], instances=three, requests={"a": 5, "b": 4, "c": 3}, leaving={"b"}))
    assert [drain.instance for drain in plan.drains] == ["b"], "its drain may not be stored yet"
    plan = reconcile(view(pools=[one], instances=three, requests={"b": 2, "c": 3}))
    assert [drain.instance for drain in plan.drains] == ["b"], "the other one may have many"
    three[1] = draining(three[1])
    plan = reconcile(view(pools=[one], instances=three, requests={"a": 0, "b": 1, "c": 0}))
    assert [drain.instance for drain in plan.drains] == ["b"], "whoever has begun to drain goes on"


def draining(one: RunnerInstance, **more: Any) -> RunnerInstance:
    """As a pod is then: it is not ready because it takes no work."""
    return replace(one, **({"draining_until": later(30), "ready": False, "attached": True} | more))


def test_only_a_draining_runner_gets_a_deadline_annotation() -> None:
    one = pool(replicas=1)
    serves, leaves = (instance(who, revision(one), ordinal=number) for number, who in enumerate(("a", "b")))
    assert reconcile(view(pools=[one], instances=[serves, leaves])).deadlines == {"b": later(30)}
    plan = reconcile(view(pools=[one], instances=[serves, replace(leaves, ready=False)]))
    assert (plan.leaving, plan.deadlines) == ({"b"}, {})
    plan = reconcile(view(pools=[one], instances=[serves, draining(leaves, drained=True)]))
    assert (plan.leaving, plan.deadlines) == ({"b"}, {"b": later(30)})  # it stays written until it is gone


def test_the_next_moment_is_the_earliest_that_is_still_to_come() -> None:
    one = pool(replicas=1)
    serves, leaves = (instance(who, revision(one), ordinal=number) for number, who in enumerate(("a", "b")))
    assert reconcile(view(pools=[one], instances=[serves])).due is None
    assert reconcile(view(pools=[one], instances=[serves, draining(leaves)])).due == later(30)
    unhealthy = replace(serves, unhealthy="it hangs", replace_at=later(5))
    assert reconcile(view(pools=[one], instances=[unhealthy, draining(leaves)])).due == later(5)
    # One that is past its deadline and still there goes when it goes: nobody looks for that all the time.
    assert reconcile(view(pools=[one], instances=[serves, draining(leaves, draining_until=NOW)])).due is None


def test_a_drain_is_cancelled_when_the_runner_is_wanted_again() -> None:
    one = pool(replicas=2)
    first, second = (instance(who, revision(one), ordinal=number) for number, who in enumerate(("a", "b")))
    plan = reconcile(view(pools=[one], instances=[first, draining(second)]))
    assert plan.drains == ()
    assert (plan.runner_sets[0].replicas, plan.runner_sets[0].leaving) == (2, ()), "no third one comes for it"
    assert plan.pools[0].draining == 0
    more = reconcile(view(pools=[pool(replicas=3)], instances=[first, draining(second)]))
    assert (more.drains, more.runner_sets[0].replicas) == ((), 3)


def test_a_finished_drain_can_be_cancelled_while_the_runner_exists() -> None:
    one = pool(replicas=2)
    first, second = (instance(who, revision(one), ordinal=number) for number, who in enumerate(("a", "b")))
    plan = reconcile(view(pools=[one], instances=[first, draining(second, drained=True)]))
    assert plan.drains == ()
    assert plan.runner_sets[0].leaving == ()


def test_a_draining_runner_that_could_serve_is_kept_before_one_that_cannot() -> None:
    one = pool(replicas=1)
    first, second = (instance(who, revision(one), ordinal=number) for number, who in enumerate(("a", "b")))
    (only,) = reconcile(view(pools=[one], instances=[replace(first, ready=False), draining(second)])).runner_sets
    assert only.leaving == ("a",)
    dead = draining(second, attached=False)
    (drain,) = reconcile(view(pools=[one], instances=[replace(first, ready=False), dead])).drains
    assert drain.instance == "b", "neither serves: what has begun to leave leaves"


def test_an_unready_runner_that_may_have_work_is_drained_first() -> None:
    one = pool(replicas=1)
    taken_back = instance("b", revision(one), ordinal=2, ready=False, attached=True)
    plan = reconcile(view(pools=[one], instances=[instance("a", revision(one)), taken_back]))
    assert [drain.instance for drain in plan.drains] == ["b"]
    assert plan.runner_sets[0].leaving == ()


def test_a_template_change_that_is_undone_cancels_the_drains() -> None:
    before, after = pool(replicas=1), pool(replicas=1, engine={"maxLoraRank": 8})
    old = draining(instance("old", revision(before)))
    new = instance("new", revision(after), ordinal=2)
    known = [runner_set(before), runner_set(after)]
    assert [one.instance for one in reconcile(view(pools=[after], instances=[old, new], runner_sets=known)).drains] == [
        "old"
    ]
    plan = reconcile(view(pools=[before], instances=[old, new], runner_sets=known))
    assert plan.drains == (), "the new one serves until the old one does again"
    assert {one: (each.replicas, each.leaving) for one, each in sets(plan).items()} == {
        revision(before): (1, ()),
        revision(after): (1, ()),
    }
    back = instance("old", revision(before))
    plan = reconcile(view(pools=[before], instances=[back, new], runner_sets=known))
    assert [one.instance for one in plan.drains] == ["new"]


def test_an_old_runner_whose_successor_fails_serves_on() -> None:
    before, after = pool(replicas=1), pool(replicas=1, engine={"maxLoraRank": 8})
    old = draining(instance("old", revision(before)))
    new = instance("new", revision(after), ordinal=2, ready=False)
    known = [runner_set(before), runner_set(after)]
    assert reconcile(view(pools=[after], instances=[old, new], runner_sets=known)).drains == ()


def test_a_node_that_is_uncordoned_keeps_its_runner_if_none_came_in_its_place() -> None:
    one = pool(replicas=2)
    here, there = instance("here", revision(one)), instance("there", revision(one), ordinal=2)
    assert moved(one, draining(here), there) == (2, [])
    assert moved(pool(replicas=1), draining(here), there) == (1 + 1, ["here"])


def test_a_draining_runner_that_is_not_ready_is_kept_until_it_is_empty() -> None:
    one = pool(replicas=1)
    first, second = (instance(who, revision(one), ordinal=number) for number, who in enumerate(("a", "b")))
    leaving = draining(second)
    assert reconcile(view(pools=[one], instances=[first, leaving])).runner_sets[0].leaving == ()
    for gone in (replace(leaving, drained=True), replace(leaving, draining_until=NOW)):
        assert reconcile(view(pools=[one], instances=[first, gone])).runner_sets[0].leaving == ("b",)


def test_a_drain_is_sent_only_once_it_is_stored() -> None:
    one = pool(replicas=0)
    (drain,) = reconcile(view(pools=[one], instances=[instance("a", revision(one))])).drains
    assert not drain.begun
    (drain,) = reconcile(view(pools=[one], instances=[draining(instance("a", revision(one)))])).drains
    assert drain.begun


def test_a_runner_that_never_served_is_removed_first_and_at_once() -> None:
    one = pool(replicas=1)
    two = [instance("old", revision(one), ordinal=1, ready=False), instance("new", revision(one), ordinal=2)]
    plan = reconcile(view(pools=[one], instances=two))
    assert plan.runner_sets[0].leaving == ("old",)
    assert [drain.instance for drain in plan.drains] == ["old"]


def test_a_changed_template_surges_then_drains_then_stops() -> None:
    before, after = pool(replicas=1), pool(replicas=1, engine={"maxLoraRank": 8})
    old = instance("old", revision(before))
    known = [runner_set(before)]

    plan = reconcile(view(pools=[after], instances=[old], runner_sets=known))
    assert sets(plan)[revision(after)].replicas == 1
    assert sets(plan)[revision(before)].replicas == 1
    assert plan.drains == ()

    new = instance("new", revision(after), ordinal=2, ready=False)
    assert reconcile(view(pools=[after], instances=[old, new], runner_sets=known)).drains == ()

    new = replace(new, ready=True)
    plan = reconcile(view(pools=[after], instances=[old, new], runner_sets=known))
    assert [drain.instance for drain in plan.drains] == ["old"]

    old = replace(old, draining_until=later(30), drained=True)
    plan = reconcile(view(pools=[after], instances=[old, new], runner_sets=known))
    assert sets(plan)[revision(before)].leaving == ("old",)


def test_an_old_runner_makes_room_for_its_successor_once_its_drain_is_over() -> None:
    before, after = pool(replicas=2), pool(replicas=2, engine={"maxLoraRank": 8})
    stays, new = instance("stays", revision(before)), instance("new", revision(after), ordinal=3)
    drains = instance("drains", revision(before), ordinal=2, draining_until=later(30))

    def replicas(old: RunnerInstance) -> tuple[int, int]:
        plan = reconcile(view(pools=[after], instances=[stays, old, new], runner_sets=[runner_set(before, 2)]))
        return sets(plan)[revision(before)].replicas, sets(plan)[revision(after)].replicas

    assert replicas(drains) == (2, 1)
    assert replicas(replace(drains, drained=True)) == replicas(replace(drains, draining_until=NOW)) == (1, 2)


def test_a_revision_that_never_gets_ready_removes_no_old_runner() -> None:
    before, after = pool(replicas=2), pool(replicas=2, engine={"maxLoraRank": 8})
    members = [
        instance("a", revision(before), ordinal=1),
        instance("b", revision(before), ordinal=2),
        instance("c", revision(after), ordinal=3, ready=False, failures=5, reason="no such rank"),
    ]
    plan = reconcile(view(pools=[after], instances=members, runner_sets=[runner_set(before, 2)]))
    assert plan.drains == ()
    assert sets(plan)[revision(after)].replicas == 1
    (status,) = plan.pools
    assert status.ready == 2
    assert condition(status.conditions, "Available").holds
    assert condition(status.conditions, "Progressing").reason == "RunnerFailing"
    assert condition(status.conditions, "Ready").message == "c: no such rank"


def test_the_condition_says_what_a_new_runner_waits_for_while_old_ones_serve() -> None:
    before, after = pool(replicas=1), pool(replicas=1, engine={"maxLoraRank": 8})
    no_room = "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    old = instance("old", revision(before))
    new = instance("new", revision(after), ordinal=2, ready=False, reason=no_room)
    (status,) = reconcile(view(pools=[after], instances=[old, new], runner_sets=[runner_set(before)])).pools
    progressing, ready = (condition(status.conditions, each) for each in ("Progressing", "Ready"))
    assert (progressing.status, progressing.reason) == ("True", "RollingOut")
    assert (ready.status, ready.reason) == ("False", "RunnersStarting")
    for one in (progressing, ready, condition(status.conditions, "Reconciling")):
        assert one.message.startswith("0 of 1 runners have the new revision, and 1 still has the old one; ")
        assert one.message.endswith(f"new: {no_room}")


def test_the_condition_says_what_another_runner_waits_for_while_some_serve() -> None:
    one = pool(replicas=3)
    members = [
        instance("a", revision(one)),
        instance("going", revision(one), ordinal=2, ready=False, draining_until=later(9), reason="its check fails"),
        instance("c", revision(one), ordinal=3, ready=False, reason="no room"),
        instance("d", revision(one), ordinal=4, ready=False),
    ]
    (status,) = reconcile(view(pools=[one], instances=members)).pools
    for type_ in ("Progressing", "Ready"):
        assert condition(status.conditions, type_).message == "1 of 3 runners are ready; c: no room"


def test_the_message_is_about_the_runner_that_fails() -> None:
    one = pool(replicas=2)
    members = [
        instance("a", revision(one), ready=False, reason="no room"),
        instance("b", revision(one), ordinal=2, ready=False, failures=2, reason="no such rank"),
    ]
    (status,) = reconcile(view(pools=[one], instances=members)).pools
    assert condition(status.conditions, "Ready").message == "b: no such rank"
    assert condition(status.conditions, "Progressing").message == "b: no such rank"


def test_leaving_and_surge_runners_do_not_count_as_replicas() -> None:
    """An autoscaler writes back what it takes for the number of runners, while that is near enough."""
    one, after = pool(replicas=2), pool(replicas=2, engine={"maxLoraRank": 8})
    a, b, c = (instance(each, revision(one), ordinal=index) for index, each in enumerate("abc"))

    def staying(wanted: PoolObject, *members: RunnerInstance) -> tuple[int, int]:
        (status,) = reconcile(view(pools=[wanted], instances=list(members))).pools
        return status.staying, status.existing

    assert staying(one, a) == (1, 1)
    assert staying(one, a, b, c) == (2, 3)
    assert staying(one, a, b, replace(c, draining_until=later(60))) == (2, 3)
    assert staying(pool(replicas=3), a, b, replace(c, draining_until=later(60), ready=False)) == (3, 3), "taken back"
    assert staying(after, a, b, instance("new", revision(after), ordinal=4, ready=False)) == (2, 3)


def test_the_runners_of_a_deleted_pool_drain_and_leave() -> None:
    gone = pool(drainTimeoutSeconds=30)
    members = [instance("a", revision(gone))]
    plan = reconcile(view(instances=members, runner_sets=[runner_set(gone)]))
    assert [drain.deadline for drain in plan.drains] == [later(30)]
    members = [replace(members[0], draining_until=later(30), drained=True)]
    plan = reconcile(view(instances=members, runner_sets=[runner_set(gone)]))
    assert plan.runner_sets[0].leaving == ("a",)


def test_pools_of_one_group_must_serve_one_model() -> None:
    plan = reconcile(view(pools=[pool("a", group="g"), pool("b", group="g", uri="file:///models/other")]))
    assert [each.pool for each in plan.runner_sets] == [name("a")]
    assert [each.pool for each in plan.catalog.pools] == [name("a")]
    accepted = condition(plan.pools[1].conditions, "Accepted")
    assert (accepted.status, accepted.reason) == ("False", "ModelMismatch")
    assert accepted.message.endswith("; use the same spec.model, or create the pool again with another spec.group")


def test_pools_of_one_group_share_their_adapters() -> None:
    two = [pool("a", group="g", model={"servedName": "m"}), pool("b", group="g", model={"servedName": "m"})]
    members = [instance("x", revision(two[1]), pool="b")]
    plan = reconcile(view(pools=two, adapters=[adapter(poolRef={"name": "g"})], instances=members))
    assert condition(plan.adapters[0].conditions, "Accepted").holds
    assert condition(plan.adapters[0].conditions, "Loaded").reason == "OnDemand"


def test_a_pools_conditions_follow_its_life() -> None:
    one = pool(replicas=1)

    def ready(*members: RunnerInstance) -> tuple[str, str]:
        (status,) = reconcile(view(pools=[one], instances=list(members))).pools
        found = condition(status.conditions, "Ready")
        return found.status, found.reason

    assert ready() == ("False", "RunnersStarting")
    assert ready(instance("a", revision(one), ready=False, failures=1)) == ("False", "RunnersStarting")
    assert ready(instance("a", revision(one), ready=False, failures=2)) == ("False", "RunnerFailing")
    assert ready(instance("a", revision(one))) == ("True", "AllRunnersReady")
    (status,) = reconcile(view(pools=[pool(replicas=0)])).pools
    assert (found := condition(status.conditions, "Ready")).holds
    assert found.reason == "ScaledToZero"


@pytest.mark.parametrize(
    ("wanted", "serving", "message"),
    [
        (3, 2, "2 of 3 runners serve"),
        (2, 3, "3 runners serve, and the pool needs 2"),
        (0, 1, "1 runner serves, and the pool needs 0"),
    ],
)
def test_a_pool_says_how_many_runners_serve_also_when_they_are_more_than_it_needs(
    wanted: int, serving: int, message: str
) -> None:
    one = pool(replicas=wanted)
    members = [instance(f"r{n}", revision(one), ordinal=n) for n in range(serving)]
    (status,) = reconcile(view(pools=[one], instances=members)).pools
    assert condition(status.conditions, "Available").message == message


# ---------------------------------------------------------------------------------------------------- cordoned nodes


def moved(of: PoolObject, *members: RunnerInstance) -> tuple[int, list[str]]:
    """Of a pool with one revision: how many runners there are to be, and which drain."""
    plan = reconcile(view(pools=[of], instances=list(members)))
    (only,) = plan.runner_sets
    return only.replicas, [drain.instance for drain in plan.drains]


def test_a_runner_on_a_cordoned_node_goes_once_another_serves_elsewhere() -> None:
    one = pool(replicas=1)
    here = instance("here", revision(one), node_is_leaving=True)
    assert moved(one, here) == (2, [])
    there = instance("there", revision(one), ordinal=2, ready=False)
    assert moved(one, here, there) == (2, [])
    there = replace(there, ready=True)
    assert moved(one, here, there) == (2, ["here"])
    here = replace(here, draining_until=later(30))
    assert moved(one, here, there) == (2, ["here"])
    (only,) = reconcile(view(pools=[one], instances=[replace(here, drained=True), there])).runner_sets
    assert (only.replicas, only.leaving) == (1, ("here",))
    assert moved(one, there) == (1, [])


def test_runners_that_are_all_on_cordoned_nodes_move_one_at_a_time() -> None:
    one = pool(replicas=2)
    members = [instance(name, revision(one), ordinal=number, node_is_leaving=True) for number, name in enumerate("ab")]
    assert moved(one, *members) == (3, [])
    members.append(instance("c", revision(one), ordinal=3))
    assert moved(one, *members) == (4, ["b"]), "the next comes while the first drains"
    members = [members[0], members[2], instance("d", revision(one), ordinal=4)]
    assert moved(one, *members) == (3, ["a"])


def test_more_surge_moves_more_at_once() -> None:
    one = pool(replicas=3, updateStrategy={"maxSurge": 2})
    members = [instance(name, revision(one), node_is_leaving=True) for name in "abc"]
    assert moved(one, *members)[0] == 5


@pytest.mark.parametrize("surge", [0, 1])
def test_a_cordon_removes_no_runner_before_its_replacement_even_with_max_unavailable(surge: int) -> None:
    """Maybe nothing fits elsewhere. Who drains the node may evict it: the pool's budget says so."""
    one = pool(replicas=1, updateStrategy={"maxSurge": surge, "maxUnavailable": 1})
    assert moved(one, instance("here", revision(one), node_is_leaving=True)) == (1 + surge, [])
    assert moved(one) == (1, []), "evicted, it is made again elsewhere"


def test_a_node_that_is_uncordoned_again_keeps_its_runner_and_the_newest_goes() -> None:
    one = pool(replicas=1)
    here = instance("here", revision(one))
    there = instance("there", revision(one), ordinal=2, ready=False)
    assert moved(one, here, there) == (1, ["there"])
    assert moved(one, here, replace(there, ready=True)) == (2, ["there"])
    leaving = replace(here, draining_until=later(30))
    assert moved(one, leaving, replace(there, ready=True)) == (2, ["here"]), "what has begun to leave leaves"


def test_a_rollout_takes_runners_off_cordoned_nodes_first() -> None:
    before, after = pool(replicas=2), pool(replicas=2, engine={"maxLoraRank": 8})
    members = [
        instance("a", revision(before), ordinal=1, node_is_leaving=True),
        instance("b", revision(before), ordinal=2),
        instance("c", revision(after), ordinal=3),
    ]
    plan = reconcile(view(pools=[after], instances=members, runner_sets=[runner_set(before, 2)]))
    assert [drain.instance for drain in plan.drains] == ["a"]
    assert (sets(plan)[revision(after)].replicas, sets(plan)[revision(before)].replicas) == (1, 2), "one extra at most"
    plan = reconcile(view(pools=[after], instances=members[1:], runner_sets=[runner_set(before, 1)]))
    assert sets(plan)[revision(after)].replicas == 2


def test_a_new_runner_on_a_node_that_is_cordoned_in_a_rollout_moves_too() -> None:
    before, after = pool(replicas=1), pool(replicas=1, engine={"maxLoraRank": 8})
    old = instance("old", revision(before), ordinal=1)
    new = instance("new", revision(after), ordinal=2, node_is_leaving=True)
    known = [runner_set(before)]
    plan = reconcile(view(pools=[after], instances=[old, new], runner_sets=known))
    assert [drain.instance for drain in plan.drains] == ["new"], "one of them makes room for the third"
    third = instance("third", revision(after), ordinal=3)
    plan = reconcile(view(pools=[after], instances=[old, third], runner_sets=known))
    assert [drain.instance for drain in plan.drains] == ["old"]


def test_fewer_replicas_take_runners_off_cordoned_nodes_first() -> None:
    one = pool(replicas=1)
    moving = instance("a", revision(one), ordinal=1, node_is_leaving=True)
    assert moved(one, moving, instance("b", revision(one), ordinal=2)) == (2, ["a"])


def test_a_pool_with_zero_replicas_moves_no_runner() -> None:
    one = pool(replicas=0)
    assert moved(one) == (0, [])
    assert moved(one, instance("a", revision(one), node_is_leaving=True)) == (1, ["a"])


def test_a_pool_says_that_its_runners_move() -> None:
    one = pool(replicas=1)
    here = instance("here", revision(one), node_is_leaving=True)
    (status,) = reconcile(view(pools=[one], instances=[here])).pools
    progressing = condition(status.conditions, "Progressing")
    assert progressing.reason == "RunnersMoving"
    assert progressing.message.startswith("1 runner is on a node that is being emptied; a runner leaves when ")
    assert condition(status.conditions, "Ready").holds
    (status,) = reconcile(view(pools=[pool(replicas=0)], instances=[here])).pools
    assert condition(status.conditions, "Progressing").reason == "ScalingDown"


# ------------------------------------------------------------------------------------------------------- properties


@dataclass
class SimulatedPool:
    """Carries out plans, and lets the test change the runners meanwhile."""

    pool: PoolObject | None
    now: datetime = NOW
    members: dict[str, RunnerInstance] = field(default_factory=dict)
    known: dict[str, ExistingSet] = field(default_factory=dict)
    made: int = 0

    def view(self) -> View:
        pools = [self.pool] if self.pool is not None else []
        return view(
            now=self.now,
            pools=pools,
            instances=list(self.members.values()),
            runner_sets=list(self.known.values()),
        )

    def carry_out(self, plan: Plan) -> bool:
        """Whether anything changed."""
        before = dict(self.members)
        until = {drain.instance: drain.deadline for drain in plan.drains}
        for one in before.values():
            self.members[one.name] = replace(
                one, draining_until=until.get(one.name), drained=one.drained and one.name in until
            )
        for each in plan.runner_sets:
            self.known[each.revision] = existing(each, self.known.get(each.revision))
            for leaving in each.leaving:
                del self.members[leaving]
            count = sum(one.revision == each.revision for one in self.members.values())
            assert count <= each.replicas
            for _ in range(each.replicas - count):
                self.made += 1
                fresh = instance(f"r{self.made}", each.revision, ordinal=self.made, ready=False)
                self.members[fresh.name] = fresh
        return self.members != before

    def settle(self) -> None:
        """Everything good that can happen happens."""
        self.members = {
            key: replace(one, ready=True, drained=one.draining_until is not None) for key, one in self.members.items()
        }


def serving(world: SimulatedPool) -> int:
    return sum(one.ready and one.draining_until is None for one in world.members.values())


pools = st.builds(
    lambda replicas, rank, drain, strategy: pool(
        replicas=replicas,
        drainTimeoutSeconds=drain,
        engine={"maxLoraRank": rank} if rank else {},
        updateStrategy={"maxSurge": strategy[0], "maxUnavailable": strategy[1]},
    ),
    st.integers(0, 4),
    st.sampled_from([0, 8, 16]),
    st.sampled_from([1, 30]),
    st.sampled_from([(1, 0), (2, 0), (0, 1), (1, 1)]),
)
accidents = st.one_of(
    st.tuples(st.just("declare"), pools),
    st.tuples(st.just("ready"), st.integers(0, 9)),
    st.tuples(st.just("dies"), st.integers(0, 9)),
    st.tuples(st.just("drained"), st.integers(0, 9)),
    st.tuples(st.just("cordon"), st.integers(0, 9)),
    st.tuples(st.just("uncordon"), st.integers(0, 9)),
    st.tuples(st.just("time"), st.integers(1, 40)),
)


@settings(max_examples=100, deadline=None)
@given(pools, st.lists(accidents, max_size=30))
def test_a_pool_keeps_serving_and_reaches_its_target_after_any_events(
    first: PoolObject, history: list[tuple[str, PoolObject | int]]
) -> None:
    world = SimulatedPool(first)
    for what, value in history:
        chosen = None
        if isinstance(value, PoolObject):
            world.pool = value
        elif what == "time":
            world.now += timedelta(seconds=value)
        elif world.members:
            chosen = sorted(world.members)[value % len(world.members)]
        if chosen is not None:
            one = world.members[chosen]
            change = {
                "ready": {"ready": True},
                "dies": {"ready": False},
                "drained": {"drained": True},
                "cordon": {"node_is_leaving": True},
                "uncordon": {"node_is_leaving": False},
            }[what]
            if what != "drained" or one.draining_until is not None:
                world.members[chosen] = replace(one, **change)
        one_round(world)
    arrives(world)


def one_round(world: SimulatedPool) -> None:
    assert world.pool is not None
    wanted = world.pool.resource.spec.replicas
    strategy = world.pool.resource.spec.update_strategy
    could, existed = serving(world), len(world.members)
    rolls_out = any(one.revision != revision(world.pool) for one in world.members.values())
    missing = strategy.max_unavailable if rolls_out else 0
    world.carry_out(reconcile(world.view()))
    assert serving(world) >= min(wanted - missing, could), "it drained one that was needed"
    staying = sum(one.draining_until is None for one in world.members.values())
    if rolls_out and any(one.revision != revision(world.pool) for one in world.members.values()):
        assert len(world.members) <= max(existed, wanted + strategy.max_surge), "it has more runners than it may"
    if len(world.members) > existed:
        assert staying <= wanted + strategy.max_surge, "it added more beyond what is wanted than it may"
    assert not world.carry_out(reconcile(world.view())), "a second look at the same moment changed something"


@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (2, 0), (0, 1), (1, 1), (2, 2)])
def test_a_rollout_whose_drains_take_long_has_no_more_pods_than_it_may(surge: int, unavailable: int) -> None:
    strategy = {"maxSurge": surge, "maxUnavailable": unavailable}
    world = SimulatedPool(pool(replicas=4, drainTimeoutSeconds=30, updateStrategy=strategy))
    one_round(world)
    world.settle()
    world.pool = pool(
        replicas=4, drainTimeoutSeconds=30, updateStrategy=strategy, engine={"maxLoraRank": 8}, generation=2
    )
    assert world.pool is not None
    most, least = 0, 4
    for _ in range(200):
        world.carry_out(reconcile(world.view()))
        most, least = max(most, len(world.members)), min(least, serving(world))
        world.now += timedelta(seconds=2)
        world.members = {key: replace(one, ready=True) for key, one in world.members.items()}
    assert {one.revision for one in world.members.values()} == {revision(world.pool)}
    assert (len(world.members), most, least) == (4, 4 + surge, 4 - unavailable)


def test_a_rollout_that_is_taken_back_needs_no_other_runner() -> None:
    before, after = pool(replicas=1), pool(replicas=1, engine={"maxLoraRank": 8})
    drains = instance("drains", revision(before), ordinal=1, draining_until=later(30))
    new = instance("new", revision(after), ordinal=2)
    plan = reconcile(view(pools=[before], instances=[drains, new], runner_sets=[runner_set(after)]))
    assert (sets(plan)[revision(before)].replicas, plan.drains[0].instance, len(plan.drains)) == (1, "new", 1)
    plan = reconcile(view(pools=[before], instances=[new], runner_sets=[runner_set(after)]))
    assert sets(plan)[revision(before)].replicas == 1


def test_removing_the_last_old_runner_removes_no_other() -> None:
    strategy = {"maxSurge": 0, "maxUnavailable": 1}
    back = pool(replicas=1, updateStrategy=strategy)
    other = revision(pool(replicas=1, engine={"maxLoraRank": 8}, updateStrategy=strategy))
    cordoned = instance("cordoned", revision(back), ordinal=1, node_is_leaving=True)
    starts = instance("starts", other, ordinal=2, ready=False)
    plan = reconcile(view(pools=[back], instances=[cordoned, starts]))
    assert [drain.instance for drain in plan.drains] == ["starts"]
    assert sets(plan)[other].leaving == ("starts",)


def arrives(world: SimulatedPool) -> None:
    assert world.pool is not None
    for _ in range(30):
        world.settle()
        world.now += timedelta(seconds=1)
        if world.pool.resource.spec.update_strategy.max_surge == 0:  # then it takes an eviction
            world.members = {key: one for key, one in world.members.items() if not one.node_is_leaving}
        changed = world.carry_out(reconcile(world.view()))
        if not changed and all(one.ready for one in world.members.values()):
            break
    assert {one.revision for one in world.members.values()} <= {revision(world.pool)}
    assert not any(one.node_is_leaving for one in world.members.values())
    assert len(world.members) == serving(world) == world.pool.resource.spec.replicas


def unhealthy(**more: object) -> RunnerInstance:
    return instance("demo-0", revision(pool()), unhealthy="its engine hangs", replace_at=later(5), **more)


def replaced(plan: Plan) -> list[tuple[str, str]]:
    return [(one.instance, one.why) for one in plan.replacements]


def test_an_unhealthy_runner_is_replaced_once_it_had_its_chance() -> None:
    parts = {"pools": [pool()], "runner_sets": [runner_set(pool())], "instances": [unhealthy()]}
    assert replaced(reconcile(view(now=later(4), **parts))) == []
    plan = reconcile(view(now=later(5), **parts))
    assert replaced(plan) == [("demo-0", "its engine hangs")]
    assert [(each.replicas, each.leaving) for each in plan.runner_sets] == [(1, ())], "it keeps its place"


def test_an_unhealthy_runner_that_drains_is_left_to_its_deadline() -> None:
    leaving = unhealthy(draining_until=later(30))
    plan = reconcile(view(now=later(9), pools=[pool(replicas=0)], instances=[leaving]))
    assert not replaced(plan)
    assert plan.drains
    shrinking = reconcile(view(now=later(9), pools=[pool(replicas=0)], instances=[unhealthy()]))
    assert not replaced(shrinking)
    assert shrinking.drains


def test_a_pool_in_an_unprepared_namespace_says_what_to_do() -> None:
    plan = reconcile(view(pools=[replace(pool(), namespace_prepared=False)]))
    (status,) = plan.pools
    found = condition(status.conditions, "Accepted")
    assert (found.status, found.reason) == ("False", "NamespaceNotPrepared")
    assert "pools.namespaces" in found.message
    assert condition(status.conditions, "Stalled").holds
    assert plan.runner_sets == plan.catalog.pools == ()


def test_a_pool_without_an_image_of_its_engine_says_what_to_set() -> None:
    wants = pool(engine={"backend": "vllm"})
    members = [instance("a", revision(wants))]
    plan = reconcile(view(pools=[replace(wants, backend_installed=False)], instances=members))
    (status,) = plan.pools
    found = condition(status.conditions, "Accepted")
    assert (found.status, found.reason) == ("False", "BackendNotInstalled")
    assert "runner.vllm.image.repository" in found.message
    assert condition(status.conditions, "Stalled").holds
    assert status.replicas == 1, "those that are there stay"
    assert [str(each.pool) for each in plan.catalog.pools] == ["default/demo"], "and serve"
    assert plan.drains == ()
    (none,) = reconcile(view(pools=[replace(wants, backend_installed=False)])).pools
    assert none.replicas == 0


def test_the_older_of_two_contradicting_pools_serves() -> None:
    young = replace(pool("a", group="g"), age=2)
    old = replace(pool("b", group="g", uri="file:///models/other"), age=1)
    plan = reconcile(view(pools=[young, old]))
    assert [condition(one.conditions, "Accepted").holds for one in plan.pools] == [False, True]
    assert {each.pool for each in plan.runner_sets} == {name("b")}


@pytest.mark.parametrize(
    "changed",
    [
        {"template": {"nodeSelector": {"gpu": "h200"}}},
        {"template": {"env": [{"name": "OMP_NUM_THREADS", "value": "1"}]}},
        {"adapterVolumes": [{"claimName": "adapters"}]},
        {"model": {"credentialsSecretRef": {"name": "hub"}}},
    ],
    ids=str,
)
def test_a_change_of_the_pod_is_a_new_revision(changed: dict[str, Any]) -> None:
    uri = "hf://motet/base"
    assert revision(pool(uri=uri, **changed)) != revision(pool(uri=uri))


def test_a_change_of_a_volumes_namespaces_is_no_new_revision() -> None:
    one = pool(adapterVolumes=[{"claimName": "a"}])
    assert revision(one) == revision(pool(adapterVolumes=[{"claimName": "a", "allowedNamespaces": {"from": "All"}}]))


def test_a_change_of_the_platforms_template_is_rolled_out() -> None:
    one = pool()
    running = instance("demo-0", revision(one))
    plan = reconcile(view(pools=[replace(one, pod_digest="newer image")], instances=[running]))
    assert {each.revision: each.replicas for each in plan.runner_sets}[revision(one)] == 1
    assert len(plan.runner_sets) == 2
    (status,) = plan.pools
    assert condition(status.conditions, "Progressing").reason == "RollingOut"
    assert condition(status.conditions, "Reconciling").holds


def test_adapters_and_slots_are_counted() -> None:
    one = pool()
    loaded = AdapterReport(
        serving_digest=DIGEST, replicas=(AdapterReplica(runner="demo-0", tier="device", digest=DIGEST),)
    )
    broken = AdapterReport(failure_code="adapter_incompatible", failure_reason="ShapeMismatch", failure_message="no")
    plan = reconcile(
        view(
            pools=[one],
            instances=[instance("demo-0", revision(one))],
            adapters=[adapter("a"), adapter("b"), adapter("c"), adapter("d", poolRef={"name": "other"})],
            adapter_reports={name("a"): loaded, name("b"): broken},
            slots={"demo-0": 8, "gone": 8},
        )
    )
    (status,) = plan.pools
    assert status.adapters == AdapterCounts(registered=3, loaded=1, failed=1)
    assert status.slots == Slots(total=8, used=1)
    found = condition(status.conditions, "AdaptersHealthy")
    assert (found.status, found.reason) == ("False", "AdaptersFailed")


def test_the_revision_in_service_moves_when_the_rollout_is_complete() -> None:
    before, after = pool(), replace(pool(engine={"maxLoraRank": 8}), current_revision=revision(pool()))
    old, new = instance("old", revision(before)), instance("new", revision(after), ordinal=2)
    (status,) = reconcile(view(pools=[after], instances=[old, new])).pools
    assert (status.current_revision, status.revision) == (revision(before), revision(after))
    (status,) = reconcile(view(pools=[after], instances=[new])).pools
    assert status.current_revision == status.revision == revision(after)


def test_the_scaling_message_changes_only_with_the_decision() -> None:
    busy = pool(autoscaling={"mode": "Builtin", "minReplicas": 1, "maxReplicas": 3})

    def decided(before: PoolObject, replicas: int, reason: str) -> PoolStatus:
        advice = {name("demo"): ScalingAdvice(replicas=replicas, reason=reason)}
        (status,) = reconcile(view(pools=[before], scaling_advice=advice)).pools
        return status

    first = decided(busy, 2, "90 requests wait")
    again = replace(busy, wanted=first.replicas, conditions=first.conditions)
    assert decided(again, 2, "91 requests wait") == first
    assert condition(decided(again, 3, "200 requests wait").conditions, "ScalingActive").message == "200 requests wait"


def test_the_message_of_a_conflict_names_those_who_write_now() -> None:
    busy = pool(autoscaling={"mode": "Builtin", "minReplicas": 1, "maxReplicas": 3})

    def decided(before: PoolObject, *writers: str) -> PoolStatus:
        (status,) = reconcile(view(pools=[replace(before, scale_writers=writers)])).pools
        return status

    first = decided(busy, "kube-controller-manager", "kubectl")
    again = decided(replace(busy, wanted=first.replicas, conditions=first.conditions), "kubectl")
    assert condition(again.conditions, "ScalingActive").message.startswith("kubectl writes spec.replicas")


def test_the_catalog_has_the_priorities_that_the_oldest_pool_of_a_group_grants() -> None:
    overrides = [{"namespace": "acme"}, {"namespace": "chat", "maxPriority": "Interactive"}]
    older = pool("a", group="g", tenants={"default": {"maxPriority": "Batch"}, "overrides": overrides})
    for entry in reconcile(view(pools=[replace(pool("b", group="g"), age=1), older])).catalog.pools:
        assert entry.max_priorities == {"*": "Batch", "acme": "Batch", "chat": "Interactive"}


def test_the_catalog_has_the_formats_that_the_oldest_pool_of_a_group_declares() -> None:
    older, newer = (
        pool("a", group="g", chat={"toolFormat": "hermes"}),
        pool("b", group="g", chat={"toolFormat": "llama3"}),
    )
    for entry in reconcile(view(pools=[replace(newer, age=1), older])).catalog.pools:
        assert entry.chat == ChatFormats(tool="hermes")


def test_the_catalog_has_the_limits_of_each_namespace() -> None:
    overrides = [{"namespace": "acme", "tokensPerMinute": 9}, {"namespace": "chat", "maxPriority": "Interactive"}]
    limited = pool("a", tenants={"default": {"requestsPerMinute": 60, "concurrency": 4}, "overrides": overrides})
    (entry,) = reconcile(view(pools=[limited])).catalog.pools
    said = {
        name: (one.requests_per_minute, one.tokens_per_minute, one.concurrency) for name, one in entry.limits.items()
    }
    assert said == {"*": (60, None, 4), "acme": (60, 9, 4), "chat": (60, None, 4)}
    (entry,) = reconcile(view(pools=[pool("a")])).catalog.pools
    assert entry.limits == {}


def test_the_catalog_has_the_weight_of_each_namespace() -> None:
    overrides = [{"namespace": "acme", "weight": 5}, {"namespace": "chat", "maxPriority": "Interactive"}]
    weighted = pool("a", tenants={"default": {"weight": 2}, "overrides": overrides})
    (entry,) = reconcile(view(pools=[weighted])).catalog.pools
    assert entry.weights == {"*": 2, "acme": 5, "chat": 2}
    (entry,) = reconcile(view(pools=[pool("a", tenants={"overrides": overrides})])).catalog.pools
    assert entry.weights == {"acme": 5}


@pytest.mark.parametrize(
    ("allowed", "tenants"),
    [
        ({"from": "Same"}, ("default",)),
        ({"from": "All"}, ("*",)),
        ({"from": "Selector", "selector": {"matchLabels": {"tier": "paid"}}}, ("acme",)),
        # Where there are no Namespaces, tenants are known by their adapters, or by name.
        ({"from": "Selector", "selector": {}}, ("acme", "default", "free", "zeta")),
        ({"from": "Selector", "selector": {"matchLabels": {"kubernetes.io/metadata.name": "beta"}}}, ("beta",)),
    ],
)
def test_the_catalog_has_the_tenants_of_the_base_model(allowed: dict[str, Any], tenants: tuple[str, ...]) -> None:
    place = view(
        pools=[pool(allowedNamespaces=allowed)],
        adapters=[adapter("zeta/legal", poolRef={"name": "demo", "namespace": "default"})],
        namespaces={"acme": {"tier": "paid"}, "free": {"tier": "free"}},
    )
    (entry,) = reconcile(place).catalog.pools
    assert entry.tenants == tenants


def test_adapters_are_counted_once_a_round_and_not_for_each_pool() -> None:
    iterations = 0

    class Adapters(tuple[AdapterObject, ...]):
        __slots__ = ()

        def __iter__(self) -> Iterator[AdapterObject]:
            nonlocal iterations
            iterations += 1
            return super().__iter__()

    def iterations_with(pools: int) -> int:
        nonlocal iterations
        iterations = 0
        tenants = Adapters([adapter("zeta/legal", poolRef={"name": "pool-0", "namespace": "default"})])
        reconcile(replace(view(pools=[pool(f"pool-{number}") for number in range(pools)]), adapters=tenants))
        return iterations

    assert iterations_with(5) == iterations_with(1) > 0


def test_the_oldest_pool_of_a_group_says_who_may_use_the_base_model() -> None:
    old = pool("old", group="both", model={"servedName": "base"})
    young = replace(pool("young", group="both", model={"servedName": "base"}, allowedNamespaces={"from": "All"}), age=1)
    plan = reconcile(view(pools=[young, old]))
    assert {str(entry.pool): entry.tenants for entry in plan.catalog.pools} == {
        "default/young": ("default",),
        "default/old": ("default",),
    }


# ------------------------------------------------------------------------------------------------------ failed runners


def test_a_runner_that_failed_for_good_is_the_reason_until_another_one_is_ready() -> None:
    one = pool(replicas=2)
    stays = instance("stays", revision(one), ordinal=10)
    evicted = [
        FailedRunner(name=who, pool=name("demo"), reason=f"Evicted: {why}", at=at)
        for who, why, at in (("gone", "the node was low on memory", 50), ("before", "the node was low on disk", 40))
    ]

    def said(*members: RunnerInstance) -> tuple[str, str]:
        (status,) = reconcile(view(pools=[one], instances=list(members), failed=evicted)).pools
        found = condition(status.conditions, "Ready")
        return found.message, condition(status.conditions, "Available").message

    gone = "gone: Evicted: the node was low on memory"
    assert said(stays)[0] == f"1 of 2 runners are ready; {gone}"
    assert said()[1] == f"no runner exists; {gone}"
    starting = instance("new", revision(one), ordinal=50, ready=False)
    assert said(stays, starting)[0].endswith(gone)
    assert said(stays, replace(starting, reason="Unschedulable: no node"))[0].endswith("; new: Unschedulable: no node")
    served_since = instance("later", revision(one), ordinal=50)
    assert said(served_since)[0] == "1 of 2 runners are ready", "what happened before is over"


# ------------------------------------------------------------------------------------------------------ hung runners


def hung(count: int, **more: Any) -> list[RunnerInstance]:
    return [
        instance(f"r{number}", revision(pool()), unhealthy="it hangs", replace_at=later(number), **more)
        for number in range(count)
    ]


def replaced_of(members: list[RunnerInstance], wanted: int, *, at_once: int = 1) -> list[str]:
    parts = {"pools": [pool(replicas=wanted)], "runner_sets": [runner_set(pool(), wanted)], "instances": members}
    return [who for who, _ in replaced(reconcile(view(now=later(60), replaced_at_once=at_once, **parts)))]


def test_of_many_runners_that_hang_one_is_replaced_at_a_time_the_longest_first() -> None:
    assert replaced_of(hung(5)[::-1], 5) == ["r0"]
    assert replaced_of(hung(5), 5, at_once=2) == ["r0", "r1"]
    others = hung(5)[1:]
    assert replaced_of(others, 5) == [], "its successor does not exist yet"
    starting = instance("new", revision(pool()), ready=False)
    assert replaced_of([*others, starting], 5) == []
    assert replaced_of([*others, starting], 5, at_once=2) == ["r1"]
    assert replaced_of([*others, replace(starting, ready=True)], 5) == ["r1"]


def test_a_runner_that_fails_again_and_again_keeps_no_hung_one() -> None:
    failing = instance("new", revision(pool()), ready=False, failures=2)
    assert replaced_of([*hung(1), failing], 2) == ["r0"]


def test_a_runner_that_starts_too_long_or_cannot_be_created_keeps_no_hung_one() -> None:
    late = instance("new", revision(pool()), ready=False, starting_until=later(60))
    assert replaced_of([*hung(1), late], 2) == ["r0"]
    soon = replace(late, starting_until=later(61))
    assert replaced_of([*hung(1), soon], 2) == []
    parts = {"pools": [pool(replicas=2)], "replaced_at_once": 1, "now": later(60)}
    waits = reconcile(view(**parts, runner_sets=[runner_set(pool(), 2)], instances=[*hung(1), soon]))
    assert waits.due == later(61)
    refused = replace(runner_set(pool(), 2), trouble="exceeded quota")
    assert [who for who, _ in replaced(reconcile(view(**parts, runner_sets=[refused], instances=hung(1))))] == ["r0"]


def test_each_pool_replaces_its_own() -> None:
    pools = [pool("a"), pool("b")]
    members = [
        instance(f"{each.resource.object_name.name}-0", revision(each), pool=str(each.resource.object_name)[8:])
        for each in pools
    ]
    members = [replace(one, unhealthy="it hangs", replace_at=NOW) for one in members]
    plan = reconcile(view(pools=pools, runner_sets=[runner_set(each) for each in pools], instances=members))
    assert [who for who, _ in replaced(plan)] == ["a-0", "b-0"]


@pytest.mark.parametrize("advice", [{}, {name("demo"): ScalingAdvice(replicas=1, stale=True)}])
def test_no_runner_leaves_because_its_number_was_not_written_before_the_operator_died(
    advice: dict[ObjectName, ScalingAdvice],
) -> None:
    one = replace(pool(autoscaling={"mode": "Builtin", "minReplicas": 1, "maxReplicas": 8}), wanted=1)
    made = runner_set(one, 5)
    there = [instance(f"r{number}", made.revision, ordinal=number, ready=number < 3) for number in range(1, 5)]
    plan = reconcile(view(pools=[one], instances=there, runner_sets=[made], scaling_advice=advice))
    assert ([each.replicas for each in plan.runner_sets], plan.drains) == ([5], ())
    leaving = [replace(each, draining_until=later(60)) for each in there[1:]]
    plan = reconcile(view(pools=[one], instances=[there[0], *leaving], runner_sets=[replace(made, replicas=4)]))
    assert [drain.instance for drain in plan.drains] == ["r2", "r3", "r4"], "these had been decided on before"
