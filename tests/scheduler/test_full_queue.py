"""Who may still wait when the queue is full."""

from motet_scheduler.policy import effects
from tests.scheduler.builders import SchedulerDriver, ready

LIMIT = 12


def enters(driver: SchedulerDriver, request: str, tenant: str) -> bool:
    driver.enqueue(request, tenant=tenant)
    return not driver.of(effects.SendRefused)


def filled() -> SchedulerDriver:
    """No runner is there, and one tenant has filled the queue."""
    driver = ready(queue_limit=LIMIT)
    for number in range(LIMIT):
        assert enters(driver, f"flood {number}", "flood")
    assert not enters(driver, "one more", "flood")
    return driver


def test_a_tenant_that_fills_the_queue_keeps_no_other_out() -> None:
    driver = filled()
    entered = [enters(driver, f"acme {number}", "acme") for number in range(LIMIT)]
    assert entered == [True] * (LIMIT // 2) + [False] * (LIMIT // 2), "an equal part"
    assert not enters(driver, "yet one more", "flood")
    assert enters(driver, "initech", "initech")


def test_however_many_tenants_come_at_most_twice_the_limit_waits() -> None:
    driver = filled()
    entered = [enters(driver, f"r{number}", f"tenant {number}") for number in range(2 * LIMIT)]
    assert entered == [True] * LIMIT + [False] * LIMIT


def test_a_stream_that_a_client_reads_is_let_in_all_the_same() -> None:
    driver = filled()
    driver.enqueue("moved", tenant="flood", delivered=3)
    assert not driver.of(effects.SendRefused)
