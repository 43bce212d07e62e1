"""How long a request waits for an adapter that is on no runner's device, and what its client learns then."""

import gc
from typing import Any

import pytest

from motet.domain import BASE
from motet.runner_info import Failure, Tier
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters.cold_waits import LOOKED_AT_ONCE, ColdWait
from motet_scheduler.policy.deadlines import SLACK
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.values import AdapterStage
from tests.scheduler.builders import PIRATE, SchedulerDriver, adapter, pool, ready, resident

MIB = 1 << 20


def with_cold_pirate(size: int = 100 * MIB, **how: Any) -> SchedulerDriver:
    driver = ready()
    driver.attach("r0")
    driver.attach("r1")
    driver.state(adapter(), pools=(pool(**how),))
    driver.certify(bytes=size)
    driver.enqueue("q", digest=PIRATE)
    assert driver.of(effects.SendPlaced)
    return driver


def waits(driver: SchedulerDriver, seconds: float) -> Failure | None:
    """With the failure with which the request is refused within this time."""
    for _ in range(round(10 * seconds)):
        driver.wait(0.1)
        for refused in driver.of(effects.SendRefused):
            return refused.failure
    return None


def come(driver: SchedulerDriver, fetched: int, **how: Any) -> None:
    driver.certify(
        instance=driver.where("q"),
        stage=AdapterStage.NONE,
        certificate=None,
        bytes=fetched,
        ordered_stage=AdapterStage.DEVICE,
        **how,
    )


def test_how_fast_a_group_fetches_is_forgotten_with_the_group() -> None:
    driver = with_cold_pirate()
    rates = driver.scheduler.state.residency.rates
    for fetched in (MIB, 2 * MIB):
        driver.wait(0.1)
        come(driver, fetched)
    assert rates
    driver.finish("q")
    driver.detach("r0")
    driver.detach("r1")
    driver.wait(driver.scheduler.config.forget_runner)
    assert not rates


def test_a_request_whose_adapter_does_not_load_in_time_is_refused_and_its_runner_told() -> None:
    driver = with_cold_pirate(cold_wait=3.0)
    assert waits(driver, 2.9) is None
    failure = waits(driver, 0.2)
    assert failure is not None
    assert failure.code == "adapter_loading"
    assert "after 3 seconds" in failure.message
    assert "admission.coldWaitSeconds" in failure.message
    assert failure.retry_after == 3, "nothing is known of how fast it comes"
    assert driver.of(effects.CancelAtRunner)
    assert not driver.scheduler.requests
    assert driver.ledger() == driver.ledger("r1") == {}


def test_many_waits_that_end_together_do_not_delay_everything_else() -> None:
    driver = with_cold_pirate(cold_wait=3.0)
    driver.attach("r2", pages=1000, max_sequences=1000)
    for n in range(2 * LOOKED_AT_ONCE):
        driver.enqueue(f"{n}", digest=PIRATE)
    driver.wait(3.1)
    refused = [len(driver.of(effects.SendRefused))]
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
        refused.append(len(driver.of(effects.SendRefused)))
    assert refused == [LOOKED_AT_ONCE, LOOKED_AT_ONCE, 1]
    assert not driver.scheduler.requests


def test_the_usual_wait_is_twenty_seconds() -> None:
    driver = with_cold_pirate()
    assert waits(driver, 19.9) is None
    assert waits(driver, 0.2) is not None


@pytest.mark.parametrize(
    ("rate", "size", "seconds"), [(2 * MIB, 100 * MIB, 47), (100 * MIB, 301 * MIB, 1), (MIB, 1000 * MIB, 60)]
)
def test_the_client_learns_when_what_lacks_will_have_come(rate: int, size: int, seconds: float) -> None:
    driver = with_cold_pirate(size, cold_wait=3.0)
    come(driver, 0)
    for second in (1, 2, 3):
        if second == 3:
            driver.clock.advance(0.9)
            come(driver, 3 * rate)
            failure = waits(driver, 0.2)
            break
        driver.wait(1.0)
        come(driver, second * rate)
    assert failure is not None
    assert failure.retry_after == pytest.approx(seconds, rel=0.07)


def test_the_rate_of_the_last_fetch_counts_for_the_next_adapter() -> None:
    driver = with_cold_pirate(cold_wait=3.0)
    come(driver, MIB)
    driver.clock.advance(2.0)
    come(driver, 21 * MIB)
    driver.certify(instance=driver.where("q"), stage=AdapterStage.DEVICE, ordered_stage=AdapterStage.DEVICE)
    driver.report(driver.where("q"), resident=resident(PIRATE, Tier.DEVICE))
    driver.finish("q")
    driver.report("r0")
    driver.report("r1")
    driver.enqueue("q", digest=PIRATE)
    failure = waits(driver, 3.1)
    assert failure is not None
    assert failure.retry_after == pytest.approx(10)


def test_a_request_whose_adapter_has_come_to_a_device_goes_on() -> None:
    driver = with_cold_pirate(cold_wait=3.0)
    driver.wait(1)
    driver.report(driver.where("q"), resident=resident(PIRATE, Tier.DISK))
    driver.wait(1)
    driver.report(driver.where("q"), resident=resident(PIRATE, Tier.DEVICE))
    driver.report(driver.where("q"), resident=resident(PIRATE, Tier.DISK))  # parked, and the adapter has made room
    assert waits(driver, 9.0) is None


def test_the_wait_goes_on_when_a_runner_declines_and_another_one_loads_it() -> None:
    driver = with_cold_pirate(cold_wait=3.0)
    driver.wait(2.0)
    first = driver.where("q")
    driver.lose("q")
    driver.wait(0.1)
    assert driver.where("q") in {"r0", "r1"}, f"it was on {first}"
    assert waits(driver, 0.7) is None
    assert waits(driver, 0.4) is not None


def test_neither_an_answer_that_its_client_reads_nor_the_base_model_nor_a_full_pool_waits_for_an_adapter() -> None:
    driver = with_cold_pirate(cold_wait=3.0)
    driver.lose("q", delivered=4)
    assert waits(driver, 9.0) is None
    base = ready()
    base.attach("r0")
    base.enqueue("q", digest=BASE)
    assert waits(base, 30.0) is None
    full = ready()
    full.attach("r0", pages=4)
    full.state(adapter(), pools=(pool(cold_wait=3.0),))
    full.certify(bytes=MIB)
    full.enqueue("first", max_tokens=30)
    full.enqueue("q", digest=PIRATE, max_tokens=30)
    assert waits(full, 9.0) is None, "it waits for room"


def test_of_two_runners_that_fetch_the_furthest_says_when_it_will_have_come() -> None:
    driver = with_cold_pirate(cold_wait=3.0)
    other = {"r0": "r1", "r1": "r0"}[driver.where("q")]
    come(driver, MIB)
    driver.clock.advance(2.0)
    come(driver, 21 * MIB)
    driver.certify(
        instance=other,
        stage=AdapterStage.NONE,
        certificate=None,
        bytes=19 * MIB,
        ordered_stage=AdapterStage.DEVICE,
    )
    failure = waits(driver, 1.1)
    assert failure is not None
    assert failure.retry_after == pytest.approx(7.9)


def test_whoever_comes_and_goes_is_remembered_no_longer_than_others() -> None:
    driver = with_cold_pirate(cold_wait=3600.0)
    for number in range(500):
        driver.enqueue(f"r{number}", digest=PIRATE)
        driver.cancel(f"r{number}")
    driver.wait(1.0)
    gc.collect()
    assert sum(type(one) is ColdWait for one in gc.get_objects()) <= SLACK + 2


def test_requests_that_have_ended_take_no_memory_while_their_wait_would_last() -> None:
    driver = with_cold_pirate(cold_wait=3600.0)
    for number in range(50):
        driver.enqueue(f"r{number}", digest=PIRATE)
        driver.cancel(f"r{number}")
    gc.collect()
    known = driver.scheduler.requests.values()
    assert len(known) == 1
    assert not [one for one in gc.get_objects() if type(one) is Request and one.id.startswith("r")]


def test_requests_that_have_ended_leave_nothing_behind() -> None:
    driver = with_cold_pirate(cold_wait=3.0)
    driver.finish("q")
    assert waits(driver, 4.0) is None
    driver.enqueue("q", digest=PIRATE)
    driver.cancel("q")
    driver.enqueue("q", digest=PIRATE)
    driver.wait(2.9)
    assert driver.of(effects.SendRefused) == []
    assert waits(driver, 0.2) is not None


def test_a_request_whose_runner_is_not_connected_is_not_refused() -> None:
    driver = with_cold_pirate(cold_wait=3.0)
    where = driver.where("q")
    driver.wait(1.0)
    driver.detach(where)
    assert waits(driver, 4.0) is None, "its client may read already"
    assert "q" in driver.scheduler.requests
