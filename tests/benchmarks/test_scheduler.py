"""The scheduler's baselines are fair: they pass nobody over and tell the same."""

from benchmarks.residency import Fleet
from benchmarks.scheduler import CONFIG, BaselineScheduler
from motet_scheduler.policy.runner_choice import Chosen, choose


def test_the_baseline_scan_leaves_no_request_waiting_that_fits() -> None:
    scan = BaselineScheduler(3)
    for _ in range(30):
        scan.decide()
        scan._scan()
        runners = scan._runners.values()
        fits = [
            request.id
            for _, _, request in scan._waiting
            if isinstance(choose(request, runners, CONFIG, scan._now), Chosen)
        ]
        assert fits == []
        assert sum(scan._waiting_by_pages.values()) == len(scan._waiting)
        scan._fill()


def test_both_sides_of_the_residency_benchmark_publish_the_same_catalog() -> None:
    ours, baseline = Fleet(runners=4), Fleet(runners=4, tells_all_at_once=True)
    for side in (ours, baseline):
        side.second()
    assert ours.scheduler.catalog != baseline.scheduler.catalog, "residency waits for its turn"
    assert 0 < ours.sent < baseline.sent
    ours.wait()
    assert ours.scheduler.catalog == baseline.scheduler.catalog


def test_the_adapters_of_the_residency_benchmark_wait_for_no_check() -> None:
    """Nobody answers it there. Only what comes and goes is measured."""
    fleet = Fleet(runners=1)
    fleet.second()
    assert [adapter.spec.ref.name for adapter in fleet.scheduler.adapters if not adapter.resolved] == []
