"""What revisions cost that requests use, and that serve no longer."""

from time import thread_time

from motet.domain import Digest
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters.adapter import Revision
from motet_scheduler.policy.adapters.drops import MAX_DROPPED
from motet_scheduler.policy.values import AdapterStage
from tests.scheduler.builders import SchedulerDriver, adapter, ready


def cost(retired: int) -> float:
    state = ready().scheduler.state
    adapters = state.adapters
    for number in range(retired):
        spec = adapter(f"a{number}")
        adapters.restore(spec, Revision(key=spec.revision, digest=Digest(f"sha256:{number:064x}")))
    adapters.state(())
    assert len(adapters.retired) == retired
    adapters.restore(adapter(), None)
    (one,) = adapters
    begin = thread_time()
    for _ in range(200):
        state.reports.report(one)
    return thread_time() - begin


def test_telling_of_an_adapter_does_not_look_at_the_retired_revisions_of_all_others() -> None:
    few, many = (min(cost(retired) for _ in range(3)) for retired in (1, 2000))
    assert many < 5 * few


def digest_of(number: int) -> Digest:
    return Digest(f"sha256:{number:064x}")


def with_requests(adapters: int, runners: int = 20) -> SchedulerDriver:
    """Each adapter is used by one request."""
    driver = ready()
    driver.scheduler.check = lambda: None  # type: ignore[method-assign]
    for number in range(runners):
        driver.attach(f"r{number}", pages=10_000, max_sequences=64, adapter_slots=64)
    driver.state(*(adapter(f"a{number}") for number in range(adapters)))
    while driver.orders:
        for key, order in list(driver.orders.items()):
            del driver.orders[key]
            driver.certify(key[1].name, digest_of(int(key[1].name[1:])), instance=key[0], order=order)
    for number in range(adapters):
        driver.enqueue(f"q{number}", digest=digest_of(number), adapter=f"default/a{number}")
    more(driver)
    return driver


def more(driver: SchedulerDriver) -> list[effects.Effect]:
    decided = list(driver.effects)
    while driver.scheduler.more_to_try:
        decided += driver.send(events.TryMore())
    return decided


def test_an_event_does_not_look_at_all_requests_while_one_uses_a_replaced_revision() -> None:
    def event_cost(retired: int) -> float:
        driver = with_requests(200)
        driver.state(*(adapter(f"a{number}") for number in range(retired, 200)))
        assert len(driver.scheduler.adapters.retired) == retired
        begin = thread_time()
        for _ in range(300):
            driver.finish("nobody")
        return thread_time() - begin

    none, one = (min(event_cost(retired) for _ in range(2)) for retired in (0, 1))
    assert one < 4 * none


def test_an_event_looks_at_few_of_many_replaced_revisions_and_drops_all_in_the_end() -> None:
    driver = with_requests(3 * MAX_DROPPED)
    driver.state()
    more(driver)
    assert len(driver.scheduler.adapters.retired) == 3 * MAX_DROPPED
    looked, is_in_use = [], driver.scheduler.state.is_in_use
    driver.scheduler.state.is_in_use = lambda digest: looked.append(digest) or is_in_use(digest)  # type: ignore[method-assign]
    for _ in range(3):
        driver.finish("nobody")
    assert sorted(looked) == [digest_of(number) for number in range(3 * MAX_DROPPED)]
    for number in range(3 * MAX_DROPPED):
        driver.finish(f"q{number}")
    driver.finish("nobody")
    more(driver)
    assert not driver.scheduler.adapters.retired


def test_what_is_deleted_together_is_dropped_by_one_event_and_those_that_go_on() -> None:
    driver = with_requests(0)
    driver.attach("r0", pages=10_000, max_sequences=64, adapter_slots=64)
    names = [f"a{number}" for number in range(3 * MAX_DROPPED)]
    for number, name in enumerate(names):
        spec = adapter(name)
        driver.scheduler.adapters.restore(spec, Revision(key=spec.revision, digest=digest_of(number)))
    driver.state()
    dropped = [one for one in driver.effects if isinstance(one, effects.DropAdapter)]
    assert 0 < len(dropped) <= MAX_DROPPED * len(driver.scheduler.runners)
    dropped = [one for one in more(driver) if isinstance(one, effects.DropAdapter)]
    assert {one.digest for one in dropped} == {digest_of(number) for number in range(len(names))}
    assert not driver.scheduler.adapters.retired


def test_a_fetch_for_what_is_dropped_is_forgotten() -> None:
    driver = with_requests(1, runners=1)
    working = {"stage": AdapterStage.NONE, "certificate": None, "ordered_stage": AdapterStage.DEVICE}
    driver.certify("a0", digest_of(0), **working, bytes=100)
    assert driver.scheduler.runners["r0"].adapters.fetches
    driver.cancel("q0")
    driver.state()
    assert not driver.scheduler.adapters.retired
    assert not driver.scheduler.runners["r0"].adapters.fetches


def test_a_fetch_is_forgotten_when_its_runner_leaves() -> None:
    driver = with_requests(1, runners=1)
    working = {"stage": AdapterStage.NONE, "certificate": None, "ordered_stage": AdapterStage.DEVICE}
    driver.certify("a0", digest_of(0), **working, bytes=100)
    driver.detach("r0")
    assert not driver.scheduler.runners["r0"].adapters.fetches
