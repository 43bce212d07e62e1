"""The scheduler's baselines are fair: they pass nobody over and tell the same. The others are measured, over less."""

import asyncio

from benchmarks import scheduler_scale
from benchmarks.residency import Fleet
from benchmarks.scheduler import CONFIG, BaselineScheduler, running_at_once
from motet_scheduler.policy.runner_choice import Chosen, choose


def test_the_baseline_scan_leaves_no_request_waiting_that_fits() -> None:
    scan = BaselineScheduler(3)
    for _ in range(30):
        scan.decide()
        scan.scan()
        waiting, runners = [request for _, _, request in scan.waiting], scan.runners.values()
        assert not any(isinstance(choose(request, runners, CONFIG, scan.now), Chosen) for request in waiting)
        assert sum(scan.waiting_by_pages.values()) == len(scan.waiting)
        scan.fill()


def test_both_sides_of_the_residency_benchmark_publish_the_same_catalog_and_wait_for_no_check() -> None:
    """Nobody answers a check there. Only what comes and goes is measured."""
    ours, baseline = Fleet(runners=4), Fleet(runners=4, tells_all_at_once=True)
    for side in (ours, baseline):
        side.second()
        assert all(adapter.resolved for adapter in side.scheduler.adapters)
    assert ours.scheduler.catalog != baseline.scheduler.catalog, "residency waits for its turn"
    assert 0 < ours.sent < baseline.sent
    ours.wait()
    assert ours.scheduler.catalog == baseline.scheduler.catalog


def test_most_places_are_in_use_where_one_tenant_has_many_adapters_and_few_slots() -> None:
    figure = running_at_once(1, 100, least=0.6, queued=1000)
    assert figure.holds, figure
    assert figure.name == "running_at_once_1_tenants"


def test_growth_whole_lives_and_the_longest_event_are_measured(capsys) -> None:
    figures = asyncio.run(scheduler_scale.measure(1, 40, queued=200, many_queued=400, many_runners=20))
    names = ["growth_runners", "growth_queued", "lives_per_s", "longest_event_ms"]
    assert [one.name for one in figures] == names
    assert all(one.value > 0 and one.target for one in figures)
    told = capsys.readouterr().out
    for kind in ("RequestFinished", "Tick", "GatewayConnected", "CancelRequested", "TryMore"):
        assert f"{kind}: " in told
