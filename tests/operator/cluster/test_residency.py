"""Statuses do not follow traffic."""

from dataclasses import replace
from datetime import timedelta

from motet_operator.cluster.decision import Decider, SchedulerReports
from motet_operator.cluster.kinds import ADAPTERS, POOLS
from motet_operator.cluster.residency import SampledResidency
from motet_operator.cluster.writes import StatusWrite
from motet_operator.reconcile import AdapterReplica, AdapterReport, ScalingAdvice
from tests.operator.builders import DIGEST, NOW, adapter, later, name
from tests.operator.cluster.objects import PLATFORM, deployment, pod, pool, snapshot
from tests.operator.cluster.objects import adapter as adapter_document

MINUTE = timedelta(seconds=60)


def held(*runners: str, **more: object) -> AdapterReport:
    replicas = tuple(AdapterReplica(runner=runner, tier="device", digest=DIGEST) for runner in runners)
    return replace(AdapterReport(serving_digest=DIGEST, replicas=replicas), **more)  # type: ignore[arg-type]


def test_replicas_are_shown_once_a_minute_and_all_else_at_once() -> None:
    residency, adapters = SampledResidency(MINUTE), [adapter("a")]

    def shown(report: AdapterReport, second: float) -> AdapterReport:
        return residency.sampled({name("a"): report}, adapters, later(second))[name("a")]

    first = held()
    assert shown(first, 0) is first
    assert shown(held("r0"), 1) is first, "the same object, so that nothing is evaluated again"
    assert shown(held("r0", "r1"), 59) is first
    assert shown(held("r0"), 60) == held("r0")
    failed = held("r0", "r1", failure_code="adapter_fetch_failed")
    assert shown(failed, 61) == failed
    assert shown(held(), 62) == held()
    assert residency.sampled({}, adapters, later(63)) == {}


def test_a_clock_that_is_set_back_delays_no_sample() -> None:
    residency, adapters = SampledResidency(MINUTE), [adapter("a")]
    seen = []
    for second, report in ((3600, held()), (3590, held("r0")), (0, held("r0", "r1")), (30, held()), (60, held("r2"))):
        found = residency.sampled({name("a"): report}, adapters, later(second))[name("a")]
        seen.append([replica.runner for replica in found.replicas])
    assert seen == [[], ["r0"], ["r0", "r1"], ["r0", "r1"], ["r2"]]


def test_runners_that_an_adapter_asks_for_are_shown_as_they_come_and_not_as_they_go() -> None:
    residency, adapters = SampledResidency(MINUTE), [adapter("a", placement={"minReplicas": 2})]

    def count(report: AdapterReport, second: float) -> int:
        return len(residency.sampled({name("a"): report}, adapters, later(second))[name("a")].replicas)

    assert count(held(), 0) == 0
    assert count(held("r0"), 1) == 1
    assert count(held("r0", "r1"), 2) == 2
    assert count(held("r0", "r1", "r2"), 3) == 2
    assert count(held("r0"), 4) == 2, "it may come and go, too"
    assert count(held("r0"), 60) == 1


def test_three_adapters_on_demand_cause_one_write_each_in_a_minute_of_traffic() -> None:
    decider = Decider(["pools"], timedelta(seconds=5), residency_interval=MINUTE)
    names = ("a", "b", "c")
    objects = {POOLS: pool(), **{(ADAPTERS, each): adapter_document(each) for each in names}}
    (found,) = decider.decide(snapshot(pool()), SchedulerReports(), PLATFORM, NOW).plan.pools
    runners = [deployment(found.revision, 1), pod("r0", found.revision)]
    written = 0
    for second in range(1, 61):
        reports = SchedulerReports(
            known={
                name(f"tenant/{each}"): held(*(["r0"] if (second + turn) % 2 else []))
                for turn, each in enumerate(names)
            },
            advice={name("pools/demo"): ScalingAdvice(replicas=1)},
            slots={"r0": 2},
        )
        decision = decider.decide(snapshot(*objects.values(), *runners), reports, PLATFORM, later(second))
        for write in decision.writes.values():
            if isinstance(write, StatusWrite):
                written += second > 1
                key = POOLS if write.kind is POOLS else (ADAPTERS, write.object[1])
                objects[key] = objects[key] | {"status": write.status}
    assert written <= len(objects)
