"""Quotas: the order of those that wait for places."""

from itertools import count

from motet.domain import RequestId
from motet.runner_info import RequestClass
from motet_scheduler.policy import effects, events, quota_gate
from motet_scheduler.policy.quotas.accounts import Holder
from motet_scheduler.policy.quotas.draws import MAX_TURNED
from motet_scheduler.policy.values import Estimate, KeyAccount, Limits
from tests.scheduler.builders import PIRATE, SchedulerDriver, adapter, pool, ready
from tests.scheduler.test_quotas import with_limits


class TwoFullAccounts:
    """A tenant and an adapter with one place each, which two streams of requests keep full: each would always have a
    next one."""

    def __init__(self, key: KeyAccount | None = None) -> None:
        """`key`: it is full in the tenant's stead."""
        self.driver: SchedulerDriver = ready()
        self.key = key
        limits = (("own", Limits(concurrency=1 if key is None else 100)),)
        self.driver.send(
            events.CatalogReplaced((pool(limits=limits),), (adapter(share=("*",), limits=Limits(concurrency=1)),))
        )
        self.driver.attach(pages=65_536, max_sequences=2048, adapter_slots=8)
        self.driver.certify()
        self.running: list[str] = []
        self.count = 0

    def enqueue(self, name: str, tenant: str, *, to_adapter: bool) -> None:
        how = {"digest": PIRATE, "adapter": "default/pirate"} if to_adapter else {}
        self.driver.enqueue(name, tenant=tenant, api_key=self.key if tenant == "own" else None, **how)
        self.note()

    def more(self) -> None:
        self.count += 1
        self.enqueue(f"base{self.count}", "own", to_adapter=False)
        self.enqueue(f"other{self.count}", "another", to_adapter=True)

    def note(self) -> None:
        self.running += [placed.request for placed in self.driver.of(effects.SendPlaced)]

    def finish_oldest(self) -> None:
        self.driver.send(events.RequestFinished("g0", RequestId(self.running.pop(0)), 1))
        self.note()


def test_a_request_that_needs_places_of_two_full_accounts_comes_in():
    both = TwoFullAccounts()
    both.more()
    both.enqueue("needs both", "own", to_adapter=True)
    rounds = 0
    while "needs both" not in both.running:
        both.more()
        both.finish_oldest()
        rounds += 1
        assert rounds <= 2 * MAX_TURNED + 2, "it keeps a place of its tenant until the adapter has one"
    assert rounds > 2, "nobody waits for it at first"
    while both.running:
        both.finish_oldest()
    both.driver.scheduler.check()
    assert not both.driver.scheduler.requests, "its own places are free again"


def test_those_that_wait_for_a_quota_are_told_their_positions_again():
    driver = with_limits(concurrency=1)
    driver.enqueue("a")
    for name in ("b", "c"):
        driver.enqueue(name, request_class=RequestClass.BATCH)
    driver.finish("a")
    driver.wait(driver.scheduler.config.positions_every)
    (told,) = driver.of(effects.SendPosition)
    assert (told.request, told.position, told.admitted) == ("c", 1, True)


def test_a_full_line_breaks_no_call_between_its_choices(monkeypatch):
    monkeypatch.setattr(quota_gate, "MAX_WAITING", 2)
    driver = with_limits(concurrency=1)
    for number in range(2):
        driver.enqueue(f"r{number}")
    driver.enqueue("a", choices=3)
    for number in (1, 2):
        driver.enqueue(f"a.{number}", choices=3, parent=RequestId("a"))
        assert not driver.of(effects.SendRefused)
    driver.enqueue("too many")
    assert driver.of(effects.SendRefused)


def test_no_place_of_an_adapter_is_kept_for_one_whose_key_is_full():
    both = TwoFullAccounts(KeyAccount("abc", Limits(concurrency=1)))
    both.more()
    both.enqueue("needs both", "own", to_adapter=True)
    while "needs both" not in both.running:
        both.more()
        both.finish_oldest()
        for account in both.driver.scheduler.state.quotas.accounts.values():
            assert account.id.holder is not Holder.ADAPTER or not account.kept_for, "other tenants need it"
        assert both.count <= 2 * MAX_TURNED + 3


def test_one_that_ends_keeps_no_place():
    both = TwoFullAccounts()
    both.more()
    both.enqueue("needs both", "own", to_adapter=True)
    accounts = both.driver.scheduler.state.quotas.accounts.values()
    while not any(account.kept_for for account in accounts):
        both.more()
        both.finish_oldest()
    both.driver.cancel("needs both")
    both.note()
    assert not any(account.kept_for for account in accounts)
    while both.running:
        both.finish_oldest()
    assert not both.driver.scheduler.requests


def test_the_position_is_that_among_those_that_wait():
    driver = with_limits(concurrency=1)
    for name in ("runs", "waits", "waits too"):
        driver.enqueue(name)
    driver.enqueue("urgent", request_class=RequestClass.INTERACTIVE)
    assert [told.position for told in driver.of(effects.SendPosition)] == [1]


def test_who_only_lacks_a_place_does_not_wait_for_the_rates_of_an_older_one():
    driver = with_limits(requests_per_minute=6, concurrency=1)
    for name in ("runs", "owes"):
        driver.enqueue(name, request_class=RequestClass.BATCH)
    driver.enqueue("owes too", request_class=RequestClass.BATCH)
    driver.enqueue("goes on", request_class=RequestClass.BATCH, delivered=5)
    assert [told.position for told in driver.of(effects.SendPosition)] == [2], "behind the one that is charged, too"
    driver.finish("runs")
    assert [placed.request for placed in driver.of(effects.SendPlaced)] == ["owes"], "it was charged, and is older"
    driver.finish("owes")
    assert [placed.request for placed in driver.of(effects.SendPlaced)] == ["goes on"]
    driver.finish("goes on")
    driver.wait(30.0)
    assert [placed.request for placed in driver.of(effects.SendPlaced)] == ["owes too"]


def test_whom_rates_keep_out_is_charged_before_newcomers_although_a_place_is_missing():
    driver = with_limits(requests_per_minute=60, concurrency=1)
    names = (f"r{number:02}" for number in count())
    for _ in range(12):  # ten seconds of the grant, and one that is owed
        driver.enqueue(next(names), request_class=RequestClass.BATCH)
    driver.wait(2.0)
    assert driver.scheduler.requests[RequestId("r11")].draw.charged
    served = ["r00"]
    for _ in range(20):  # half of the rate, and all of the concurrency
        driver.wait(2.0)
        driver.finish(served[-1])
        served += [placed.request for placed in driver.of(effects.SendPlaced)]
        driver.enqueue(next(names), request_class=RequestClass.BATCH)
    assert served == [f"r{number:02}" for number in range(21)]


def test_nobody_of_batch_draws_before_an_older_one_that_rates_keep_out():
    driver = with_limits(requests_per_minute=60)
    for number in range(13):
        driver.enqueue(f"r{number:02}", request_class=RequestClass.BATCH)
    driver.clock.advance(5.0)  # the account owes nothing any more, and nobody has looked yet
    driver.enqueue("late", request_class=RequestClass.BATCH)
    assert not driver.of(effects.SendPlaced)
    driver.wait(0.001)
    placed = [one.request for one in driver.of(effects.SendPlaced)]
    assert placed == ["r11", "r12", "late"]
    driver.scheduler.check()


def test_a_newcomer_waits_for_those_before_him_also_while_their_rates_are_taken_away(monkeypatch):
    monkeypatch.setattr(quota_gate, "LET_IN_AT_ONCE", 1)
    driver = with_limits(requests_per_minute=6)
    for number in range(6):
        driver.enqueue(f"r{number}", request_class=RequestClass.BATCH)
    driver.state(pools=(pool(limits=(("*", Limits(concurrency=100)),)),))
    driver.enqueue("late", request_class=RequestClass.BATCH)
    assert driver.scheduler.requests[RequestId("late")].held
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
    assert not any(request.held for request in driver.scheduler.requests.values())


def test_what_comes_back_lets_a_batch_request_in_earlier():
    driver = with_limits(tokens_per_minute=6000)
    driver.enqueue("a", max_tokens=100_000, estimate=Estimate(q90=6900))
    driver.enqueue("waits", request_class=RequestClass.BATCH)
    driver.clock.advance(1.0)
    driver.send(events.RequestFinished("g0", RequestId("a"), 1, output_tokens=2000))
    began = driver.clock()
    while not driver.of(effects.SendPlaced):
        driver.clock.advance(max(0.001, driver.scheduler.next_due() - driver.clock()))
        driver.send(events.Tick())
        assert driver.clock() - began < 11, "a sixth of a minute's grant is owed, not all of it"


def test_the_time_that_a_quota_keeps_a_request_out_is_no_time_in_the_queue():
    """For it, no runner is missing."""
    driver = with_limits(runner=False, concurrency=1)
    driver.enqueue("first", deadline=300.0)
    driver.enqueue("waits", deadline=300.0)
    driver.clock.advance(60.0)
    driver.cancel("first")
    request = driver.scheduler.requests[RequestId("waits")]
    assert (request.held, request.waits_since) == (False, driver.clock())
    driver.wait(240.0)
    (refused,) = driver.of(effects.SendRefused)
    assert "The request waited 240 seconds and no runner could take it" in refused.failure.message
