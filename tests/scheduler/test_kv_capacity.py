"""Adapters in use take pages that KV cannot have: scheduler and supervisor follow what the runner reports."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.domain import BASE, InstanceName, RequestId
from motet.promises import PromiseRule
from motet.runner_info import Capacity
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.values import Certificate, Promise
from motet_simulator.fake_engine import PAGE_BYTES, FakeEngine, SlowEngines, tokens_of
from tests.scheduler.builders import PIRATE, POET, adapter, entry, ready
from tests.support.in_process_runner import write_adapter
from tests.support.in_process_services import adapter_entry, until
from tests.support.in_process_system import in_process_system
from tests.support.metric_values import value_of

R0 = InstanceName("r0")
LENGTH = 159
"""With a prompt of one token, a request of this length takes exactly ten pages."""


def runner(pages=10):
    driver = ready()
    driver.attach(pages=pages)
    return driver


def test_requests_are_placed_in_the_pages_that_the_runner_reports():
    driver = runner()
    driver.report("r0", pages=8)
    driver.enqueue("a")
    driver.enqueue("b")
    assert (driver.where("a"), driver.where("b")) == ("r0", ""), "each needs five pages"
    driver.report("r0", entry("a", 5), pages=10)
    assert driver.where("b") == "r0"


@pytest.mark.parametrize(("reported", "pages"), [(0, 10), (7, 7), (10, 10), (11, 10)])
def test_a_report_without_pages_means_all_of_them_and_none_means_more(reported, pages):
    driver = runner()
    driver.report("r0", pages=6)
    driver.report("r0", pages=reported)
    assert driver.scheduler.runners[R0].ledger.capacity == pages


def test_the_pages_stay_what_they_were_while_the_runner_connects_again():
    driver = runner()
    driver.report("r0", pages=6)
    driver.detach()
    driver.attach(pages=10)
    assert driver.scheduler.runners[R0].ledger.capacity == 6


def test_promises_that_exceed_the_pages_now_stay_and_nothing_is_added():
    driver = runner()
    driver.enqueue("a")
    driver.enqueue("b")
    driver.report("r0", entry("a", 5), entry("b", 5), pages=6)
    assert driver.ledger() == {("a", 1): 5, ("b", 1): 5}
    driver.enqueue("c", max_tokens=1)
    assert not driver.where("c")


STEPS = st.lists(st.tuples(st.sampled_from(["enqueue", "report", "finish"]), st.integers(1, 40)), max_size=40)


@given(STEPS, st.sampled_from([1.0, 1.5]))
def test_no_placement_makes_the_promises_exceed_what_was_reported_times_overcommit(steps, factor):
    driver = runner(pages=40)
    driver.send(events.SupervisorConnected())
    driver.send(events.OvercommitSet("default/demo", factor))
    reported, live = 40, {}
    for number, (what, size) in enumerate(steps):
        match what:
            case "enqueue":
                driver.enqueue(f"q{number}", prompt=1, max_tokens=16 * size)
            case "report":
                reported = size
                driver.report("r0", *(entry(name, pages) for name, pages in live.items()), pages=size)
            case "finish" if live:
                name = sorted(live)[size % len(live)]
                del live[name]
                driver.finish(name)
        placed = {one.request: one.promise.pages for one in driver.of(effects.SendPlaced)}
        live |= placed
        assert not placed or sum(live.values()) <= reported * factor


# ------------------------------------------------------------------- adapters of requests that were placed a moment ago


@pytest.mark.parametrize(
    ("rank", "tile", "rank_bytes", "pages"),
    [(8, 1, 1024, 8), (8, 16, 1024, 16), (17, 16, 1024, 32), (8, 1, 1025, 9), (8, 16, 0, 0), (0, 16, 1024, 0)],
)
def test_an_adapter_takes_whole_pages_at_its_rank_in_whole_tiles(rank, tile, rank_bytes, pages):
    capacity = Capacity(pages=100, page_bytes=1024, adapter_rank_bytes=rank_bytes, adapter_rank_tile=tile)
    assert capacity.adapter_pages(rank) == pages


PIRATE_PAGES, POET_PAGES = 8, 2


def runner_with_adapters(pages=20):
    driver = runner_of_unknown_adapters(pages)
    certify(driver)
    return driver


def runner_of_unknown_adapters(pages=20, **capacity):
    driver = ready()
    driver.attach(pages=pages, page_bytes=1024, adapter_rank_bytes=512, adapter_rank_tile=4, **capacity)
    driver.state(adapter("pirate"), adapter("poet"))
    return driver


def certify(driver):
    driver.certify(certificate=Certificate(digest=PIRATE, rank=16))
    driver.certify("poet", POET, certificate=Certificate(digest=POET, rank=3))


def capacity_of(driver):
    return driver.scheduler.runners[R0].ledger.capacity


def test_the_first_request_of_an_adapter_takes_the_adapters_pages_and_the_next_one_does_not():
    driver = runner_with_adapters()
    driver.enqueue("a", digest=PIRATE)
    assert capacity_of(driver) == 12
    driver.enqueue("b", digest=PIRATE)
    driver.enqueue("c", max_tokens=32)
    assert (driver.where("a"), driver.where("b"), driver.where("c")) == ("r0", "r0", ""), "5 + 5 + 3 pages on 12"


def test_an_adapter_that_scales_results_takes_the_pages_of_its_rank_on_the_device():
    driver = runner_of_unknown_adapters()
    driver.certify(certificate=Certificate(digest=PIRATE, rank=16, device_rank=18))
    driver.enqueue("a", digest=PIRATE)
    assert capacity_of(driver) == 10


def test_a_request_waits_until_its_promise_and_its_adapter_fit():
    driver = runner_with_adapters()
    driver.enqueue("a")
    driver.enqueue("b")
    driver.enqueue("c", digest=PIRATE)
    waiting = driver.scheduler.requests[RequestId("c")]
    assert waiting.waiting_reason == "it needs 5 pages and 2 are free"
    driver.enqueue("d", digest=POET, tenant="other")
    assert driver.where("d") == "r0", "5 and 2 pages on 10"
    driver.finish("d")
    driver.finish("a")
    assert driver.where("c") == "r0"


def test_an_adapter_that_the_report_counts_is_not_charged_twice():
    driver = runner_with_adapters()
    driver.enqueue("a", digest=PIRATE)
    driver.report("r0", entry("a", 5, digest=PIRATE), pages=12)
    assert capacity_of(driver) == 12
    driver.enqueue("b", digest=POET)
    assert capacity_of(driver) == 10, "the report was written before b was placed"


def test_pages_of_an_adapter_come_back_with_the_report():
    driver = runner_with_adapters()
    driver.enqueue("a", digest=PIRATE)
    driver.report("r0", entry("a", 5, digest=PIRATE), pages=12)
    driver.finish("a")
    assert capacity_of(driver) == 12, "the runner may use it still"
    driver.report("r0", pages=20)
    assert capacity_of(driver) == 20


def test_an_adapter_whose_rank_becomes_known_is_charged_from_the_next_report_on():
    driver = runner_of_unknown_adapters()
    driver.enqueue("a", digest=PIRATE)
    driver.report("r0", entry("a", 5, digest=PIRATE))
    assert capacity_of(driver) == 20
    certify(driver)
    driver.report("r0", entry("a", 5, digest=PIRATE))
    assert capacity_of(driver) == 12
    driver.finish("a")
    assert capacity_of(driver) == 20


def test_what_never_fits_beside_its_adapter_is_refused():
    driver = runner_with_adapters()
    driver.enqueue("a", prompt=1, max_tokens=16 * 13, digest=PIRATE)
    (refused,) = driver.of(effects.SendRefused)
    assert "13 pages of 16 tokens beside its adapter's 8 and a runner holds 20" in refused.failure.message
    driver.enqueue("b", prompt=1, max_tokens=16 * 12, digest=PIRATE)
    assert driver.where("b") == "r0"


def test_a_promise_by_the_models_context_leaves_the_adapters_pages():
    driver = runner_of_unknown_adapters(promise_rule=PromiseRule.CONTEXT)
    certify(driver)
    driver.enqueue("a", digest=PIRATE)
    assert driver.ledger() == {("a", 1): 12}


def test_a_parked_request_resumes_when_its_promise_and_its_adapter_fit():
    driver = runner_with_adapters()
    driver.send(events.SupervisorConnected())
    driver.enqueue("a", digest=PIRATE)
    driver.enqueue("b")
    driver.send(events.RequestParked(R0, RequestId("a"), 1, Promise(8)))
    assert not driver.of(effects.AllowResume), "8 and 8 pages, and b has 5 of 20"
    driver.finish("b")
    assert driver.of(effects.AllowResume)


USED = st.lists(
    st.tuples(
        st.sampled_from(["enqueue", "enqueue", "report", "finish"]),
        st.sampled_from([BASE, PIRATE, POET]),
        st.integers(1, 12),
    ),
    max_size=40,
)


@given(USED)
def test_promises_and_adapters_in_use_always_fit_the_pages(steps):
    driver = runner_with_adapters()
    pages_of = {BASE: 0, PIRATE: PIRATE_PAGES, POET: POET_PAGES}
    live = {}
    for number, (what, digest, size) in enumerate(steps):
        match what:
            case "enqueue":
                driver.enqueue(f"q{number}", prompt=1, max_tokens=16 * size, digest=digest, tenant=f"t{number}")
            case "report":
                adapters = sum(pages_of[one] for one in {digest for digest, _ in live.values()})
                listed = (entry(name, pages, digest=digest) for name, (digest, pages) in live.items())
                driver.report("r0", *listed, pages=20 - adapters)
            case "finish" if live:
                name = sorted(live)[size % len(live)]
                del live[name]
                driver.finish(name)
        for one in driver.of(effects.SendPlaced):
            live[one.request] = driver.scheduler.requests[one.request].digest, one.promise.pages
        in_use = {digest for digest, _ in live.values()}
        assert sum(pages for _, pages in live.values()) + sum(pages_of[one] for one in in_use) <= 20


# ------------------------------------------------------------------------------------------------------- over real gRPC


async def test_scheduler_and_supervisor_follow_a_runner_over_grpc(folder):
    engines = SlowEngines(0.02, pages=20)
    async with in_process_system(folder) as system:
        served = await system.runner("r0", engines)
        (engine,) = engines.made
        known = system.control.scheduler.runners[R0]
        supervised = system.control.supervisor_service.supervisor.runners
        await until(lambda: R0 in supervised)
        watched = supervised[R0]
        engine.ledger.capacity = 12
        await until(lambda: known.ledger.capacity == watched.ledger.capacity == 12)
        assert watched.ledger.free == 12
        answers = [system.gateway.start(f"{n}", prompt=(n,), max_tokens=LENGTH, q80=LENGTH) for n in range(2)]
        await until(lambda: known.ledger.promised == 10, why="one of two requests of ten pages on twelve")
        await until(lambda: any(one.tokens for one in system.gateway.live()))
        assert known.ledger.promised == 10
        engine.ledger.capacity = 20
        await until(lambda: known.ledger.promised == 20)
        engines.hurry()
        for n, answer in enumerate(answers):
            assert await answer == tokens_of((n,), 7, LENGTH)
        assert all(len(asked.placements) == 1 for asked in system.gateway.asked.values()), "a request was declined"
        metrics = served.service.metrics
        assert value_of(metrics.pages) == 20


class OnePool(FakeEngine):
    """Its adapters have eight pages each of the same pool, while sequences use them."""

    def __post_init__(self):
        super().__post_init__()
        self.info = replace(self.info, adapter_rank_bytes=2 * PAGE_BYTES, adapter_rank_tile=4)

    def add(self, sequence):
        self.count_adapters(sequence.adapter)
        super().add(sequence)

    def report(self):
        self.count_adapters()
        return super().report()

    def count_adapters(self, *more):
        in_use = {one.adapter for one in self.planner.sequences} | set(more)
        self.ledger.capacity = self.pages - 8 * len(in_use - {BASE})


async def test_the_scheduler_charges_the_adapters_of_a_runner_before_they_are_reported(folder):
    engines = []

    def engine():
        engines.append(OnePool(pages=30, step_seconds=0.02))
        return engines[-1]

    names = ("a", "b", "c")
    async with in_process_system(folder) as system:
        await system.runner("r0", engine)
        sources = {name: write_adapter(folder / name, seed=seed) for seed, name in enumerate(names)}
        system.operator.state(*(adapter_entry(name, source) for name, source in sources.items()))
        await until(lambda: all((one := system.operator.adapter(name)) and one.serving_digest for name in names))
        digests = [system.operator.adapter(name).serving_digest for name in names]
        known = system.control.scheduler.runners[R0]
        answers = [
            system.gateway.start(name, prompt=(1,), max_tokens=LENGTH, q80=LENGTH, adapter=digest)
            for name, digest in zip(names, digests, strict=True)
        ]
        await until(lambda: known.ledger.promised == 10)
        assert known.ledger.capacity == 22, "a second one needs 8 and 10 pages, and 12 are free"
        engines[0].step_seconds = 0.0
        for digest, answer in zip(digests, answers, strict=True):
            assert await answer == tokens_of((1,), 7, LENGTH, digest)
        assert all(len(asked.placements) == 1 for asked in system.gateway.asked.values()), "a request was declined"
