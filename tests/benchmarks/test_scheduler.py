"""The scheduler's baseline is a fair one: it stops early, and yet passes nobody over."""

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
