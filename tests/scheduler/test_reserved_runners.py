"""A runner that is reserved for an overdue request which lacks an adapter slot alone still works for others."""

from itertools import repeat
from random import Random

import pytest

from motet.domain import BASE, Digest, InstanceName, RequestId
from motet.errors import AdapterUnproved, ParameterUnavailable
from motet.runner_info import BatchCap, Failure, RequestClass
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.reserved_runners import MIN_STEP_SECONDS
from motet_scheduler.policy.values import Estimate
from tests.scheduler.builders import GROUP, PIRATE, POET, adapter, entry, ready, reserved
from tests.scheduler.load import Ask, Load

BARD = Digest("sha256:" + "c" * 64)
NAMES = {BASE: "", PIRATE: "default/pirate", POET: "default/poet", BARD: "default/bard"}
RESERVED = "a runner is reserved for a request that has waited for longer"


def ready_with(*runners, slots=1, **capacity):
    """After two others have passed it, a request is overdue."""
    driver = ready(max_passed_over=2, headroom_one_in=0)
    for name in runners:
        driver.attach(name, **({"max_sequences": 16, "adapter_slots": slots} | capacity))
    driver.state(*(adapter(name.partition("/")[2]) for name in NAMES.values() if name))
    digests = {name: digest for digest, name in NAMES.items()}
    for instance, name, _ in list(driver.orders):
        driver.certify(name.name, digests[str(name)], instance=instance)
    return driver


def ask(driver, name, digest=BASE, *, pages=2, **how):
    """Each request is of a tenant of its own. Returns where it runs."""
    driver.enqueue(name, tenant=name, digest=digest, adapter=NAMES[digest], prompt=1, max_tokens=16 * pages - 1, **how)
    return driver.where(name)


def overdue(driver, digest, **how):
    """A request that lacks a slot, and has been passed twice."""
    assert ask(driver, "overdue", digest, **how) == ""
    for n in range(2):
        assert ask(driver, f"passes{n}") != ""


def test_while_it_lacks_a_slot_alone_requests_of_the_base_model_go_on():
    driver = ready_with("r0")
    ask(driver, "pirate", PIRATE)
    overdue(driver, POET)
    for n in range(40):
        assert ask(driver, f"base{n}") == "r0"
        assert reserved(driver) == {"r0": "overdue"}
        driver.finish(f"base{n - 1}" if n else "passes0")
    driver.finish("pirate")
    assert driver.where("overdue") == "r0"


def passed_on(driver, instance, waiting, *, times=5):
    """Others go on there, each in the place of one before. Nobody counts them for the one that waits."""
    runner = driver.scheduler.runners[InstanceName(instance)]
    for n in range(times):
        driver.finish(next(iter(runner.entries))[0])
        assert ask(driver, f"{instance}-{n}") == instance
        assert driver.where(waiting) == ""
        assert driver.scheduler.queues[GROUP].overdue() == {}


def test_what_is_placed_on_a_runner_that_has_refused_its_adapter_does_not_pass_it():
    driver = ready_with("r0", "r1", slots=4, max_sequences=2)
    refused = Failure.of(AdapterUnproved("Its results are wrong."))
    driver.certify(instance="r1", certificate=None, failure=refused, order=0)
    assert [ask(driver, f"base{n}") for n in range(4)] == ["r1", "r1", "r0", "r0"]
    assert ask(driver, "pirate", PIRATE) == ""
    passed_on(driver, "r1", "pirate")
    driver.finish("base2")
    assert driver.where("pirate") == "r0"


def test_what_is_placed_on_a_runner_that_can_never_take_it_does_not_pass_it():
    driver = ready(max_passed_over=2, headroom_one_in=0)
    driver.attach("r0", max_sequences=2)
    driver.attach("r1", max_sequences=2, revision="2")
    assert [ask(driver, f"base{n}") for n in range(4)] == ["r1", "r1", "r0", "r0"]
    driver.finish("base0")
    assert ask(driver, "picky") == "r1"
    never = Failure.of(ParameterUnavailable("It has no such parameter."))
    driver.send(events.RunnerDeclined(InstanceName("r1"), RequestId("picky"), 1, never))
    driver.lose("picky")
    assert ask(driver, "next") == "r1"
    passed_on(driver, "r1", "picky")
    driver.attach("r2", max_sequences=1, revision="2")  # made like the one that can never take it
    assert ask(driver, "other") == "r2"
    passed_on(driver, "r2", "picky")
    driver.finish("base2")
    assert driver.where("picky") == "r0"


def test_those_that_waited_go_on_when_one_ends():
    driver = ready_with("r0", max_sequences=4)
    ask(driver, "pirate", PIRATE)
    overdue(driver, POET)
    assert ask(driver, "waits") == "", "the last place is for the overdue one"
    driver.finish("passes0")
    assert driver.where("waits") == "r0"


@pytest.mark.parametrize(("pages", "where"), [(46, "r0"), (47, "")])
def test_the_pages_that_it_needs_are_kept(pages, where):
    driver = ready_with("r0")
    ask(driver, "pirate", PIRATE)
    overdue(driver, POET, pages=48)
    assert ask(driver, "base", pages=pages) == where


def test_those_of_adapters_that_run_there_go_on_but_for_the_one_that_leaves_first():
    driver = ready_with("r0", slots=2)
    for name, digest in (("pirate", PIRATE), ("poet0", POET), ("poet1", POET)):
        ask(driver, name, digest)
    overdue(driver, BARD)
    assert ask(driver, "poet2", POET) == "r0"
    assert ask(driver, "second pirate", PIRATE) == ""
    (position,) = driver.of(effects.SendPosition)
    assert position.why == RESERVED
    driver.finish("pirate")
    assert driver.where("overdue") == "r0"


@pytest.mark.parametrize("adopted", [False, True])
def test_when_another_adapter_is_the_least_used_one_those_who_waited_for_that_go_on(adopted):
    """Not only after the next report of the runner."""
    driver = ready_with("r0", slots=2)
    for name, digest in (("pirate", PIRATE), ("poet0", POET), ("poet1", POET)):
        ask(driver, name, digest)
    overdue(driver, BARD)
    assert ask(driver, "second pirate", PIRATE) == ""
    for n in range(2):
        if adopted:
            driver.gateway(f"g{n + 1}", driver.live(f"urgent{n}", digest=PIRATE))
        else:
            assert ask(driver, f"urgent{n}", PIRATE, request_class=RequestClass.INTERACTIVE) == "r0"
        assert driver.where("second pirate") == ("r0" if n else "")


def test_one_that_may_not_pass_hides_no_other_one_that_may():
    driver = ready_with("r0", slots=2, max_sequences=6, pages=16)
    for name, digest in (("pirate", PIRATE), ("poet0", POET), ("poet1", POET)):
        ask(driver, name, digest)
    overdue(driver, BARD)
    for n in range(40):
        ask(driver, f"pirate{n}", PIRATE)
    assert ask(driver, "poet2", POET) == "", "no place is left but that of the overdue one"
    driver.finish("passes0")
    assert driver.where("poet2") == "r0"


def test_it_stays_reserved_where_it_lacks_a_slot_alone_though_others_take_what_it_leaves():
    """Else it would begin again elsewhere, each time that more pages are free there."""
    driver = ready_with("r0", "r1")
    for name in ("r0", "r1"):
        assert ask(driver, f"pirate on {name}", PIRATE, pages=30) != ""
        ask(driver, f"base on {name}", pages=60)
    overdue(driver, POET)
    (instance,) = reserved(driver)
    other = "r1" if instance == "r0" else "r0"
    driver.finish(f"base on {other}" if driver.where(f"base on {other}") == other else f"base on {instance}")
    assert reserved(driver) == {instance: "overdue"}


@pytest.mark.parametrize("max_sequences", [4, 16])
def test_it_stays_reserved_where_it_lacks_a_slot_though_others_have_left_no_place_or_no_page(max_sequences):
    driver = ready_with("r0", "r1", max_sequences=max_sequences)
    for n in range(2):
        assert ask(driver, f"pirate{n}", PIRATE, pages=90) != ""
    overdue(driver, POET, pages=4)
    (instance,) = reserved(driver)
    names = iter(f"base{n}" for n in range(40))
    while ask(driver, next(names)):
        pass
    runs = [one for one in driver.scheduler.requests.values() if driver.where(one.id) not in ("", instance)]
    for one in runs:
        if one.digest == BASE:
            driver.finish(one.id)
    assert reserved(driver) == {instance: "overdue"}


@pytest.mark.parametrize("seed", range(4))
def test_beside_full_batches_it_never_begins_again_on_another_runner(seed):
    drawn, numbers, runners, places = Random(seed), iter(range(10_000)), 12, 8
    driver = ready_with(*(f"r{n}" for n in range(runners)), max_sequences=places, pages=400)

    def one_more():
        ask(driver, f"{next(numbers)}", drawn.choice((BASE, *4 * [PIRATE])), pages=drawn.randint(1, 4))

    for _ in range(runners * places + 6):
        one_more()
    ask(driver, "overdue", BARD)
    held = set()
    for _ in range(5 * runners * places):
        one = drawn.choice([request for request in driver.scheduler.requests.values() if not request.waiting])
        driver.finish(one.id, one.epoch)
        if driver.where("overdue"):
            break
        while sum(request.waiting for request in driver.scheduler.requests.values()) < 7:
            one_more()
        held |= {instance for instance, request in reserved(driver).items() if request == "overdue"}
    assert len(held) == 1
    assert driver.where("overdue") != ""


@pytest.mark.parametrize("seed", range(8))
def test_however_many_others_come_the_overdue_one_has_a_place_when_each_that_runs_has_ended(seed):
    """One more always comes for each adapter that runs."""
    drawn, driver = Random(seed), ready_with("r0", slots=2, max_sequences=8)
    numbers = iter(range(10_000))
    for digest in (PIRATE, PIRATE, POET, POET, POET):
        ask(driver, f"{next(numbers)}", digest)
    overdue(driver, BARD)
    for _ in range(4):
        running = [request.id for request in driver.scheduler.requests.values() if not request.waiting]
        drawn.shuffle(running)
        for one in running:
            for digest in drawn.sample((BASE, PIRATE, POET), 3):
                ask(driver, f"{next(numbers)}", digest)
            driver.finish(one, driver.scheduler.requests[RequestId(one)].epoch)
        if driver.where("overdue"):
            return
    raise AssertionError("it waits for ever")


# ----------------------------------------------------------------------------------------- who pays for idle pages


def counter_of(driver, tenant):
    shares = driver.scheduler.queues[GROUP].class_queues[RequestClass.STANDARD].shares
    share = shares.of(tenant) or shares.resting[tenant]
    return share.counter + share.owed


def reserved_with_idle_pages(*, others_wait=True, step_seconds=0.5):
    """25 pages of r0 are kept, as many as a request there has in the mean."""
    driver = ready(max_passed_over=1, headroom_one_in=0)
    driver.attach(pages=100, max_sequences=10)
    driver.report(step_seconds=step_seconds)
    driver.enqueue("runs", tenant="large", prompt=1, max_tokens=16 * 5 - 1)
    ask(driver, "long", pages=60)
    assert ask(driver, "large", pages=80, estimate=Estimate(q50=100)) == ""
    assert ask(driver, "small", pages=10) == "r0"
    assert reserved(driver) == {"r0": "large"}
    if others_wait:
        assert ask(driver, "waits", pages=10) == ""
    driver.clock.advance(5.0)
    return driver


BEFORE = 1 + 2 * 79
"""What its tenant has paid for the one that runs."""
IDLE = 2 * 5.0 / 0.5
"""The cost of the pages of one in five seconds."""


def test_who_has_a_runner_reserved_pays_for_what_is_idle_meanwhile():
    driver = reserved_with_idle_pages()
    driver.finish("small")
    assert counter_of(driver, "large") == BEFORE + IDLE
    driver.finish("long")
    assert driver.where("large") == "r0"
    paid = counter_of(driver, "large")
    assert paid == BEFORE + IDLE + 1 + 2 * 100
    driver.clock.advance(5.0)
    driver.finish("runs")
    assert counter_of(driver, "large") == paid - 2 * 79, "it runs, and keeps nothing idle"


def test_who_gives_up_before_it_has_a_place_pays_too():
    driver = reserved_with_idle_pages()
    driver.cancel("large")
    assert counter_of(driver, "large") == BEFORE + IDLE


@pytest.mark.parametrize("why", [{"others_wait": False}, {"step_seconds": 0.0}])
def test_what_nobody_else_waits_for_is_free_and_where_nobody_knows_how_long_a_token_takes(why):
    driver = reserved_with_idle_pages(**why)
    driver.cancel("large")
    assert counter_of(driver, "large") == BEFORE


def test_what_the_same_tenant_alone_waits_for_is_free():
    """Else it would owe this to tenants that come later."""
    driver = reserved_with_idle_pages(others_wait=False)
    driver.enqueue("waits", tenant="large", prompt=1, max_tokens=16 * 10 - 1)
    driver.finish("small")
    assert reserved(driver) == {"r0": "large"}
    driver.clock.advance(5.0)
    driver.cancel("waits")
    driver.cancel("large")
    assert counter_of(driver, "large") == BEFORE


def test_a_runner_that_says_that_it_takes_no_time_ruins_nobody():
    driver = reserved_with_idle_pages(step_seconds=1e-12)
    driver.cancel("large")
    assert counter_of(driver, "large") == pytest.approx(BEFORE + 2 * 5.0 / MIN_STEP_SECONDS)


def test_a_runner_that_has_more_than_its_cap_on_the_batch_pays_nobody():
    driver = reserved_with_idle_pages()
    live = [entry(request, pages) for (request, _), pages in driver.ledger().items()]
    driver.report("r0", *live, step_seconds=0.5, batch_cap=BatchCap(target_seconds=0.1, sequences=1))
    assert reserved(driver) == {"r0": "large"}
    before = counter_of(driver, "large")
    driver.clock.advance(5.0)
    driver.cancel("large")
    assert counter_of(driver, "large") == before


def test_requests_as_large_as_a_runner_take_no_more_than_a_share():
    """Each of them empties the runner first."""
    alone, beside = (
        Load(pages=100, max_sequences=16, config={"max_passed_over": 2, "headroom_one_in": 0}) for _ in range(2)
    )
    for load in (alone, beside):
        for runner in load.driver.scheduler.runners.values():
            runner.step_seconds = 1.0
        for tenant in "ab":
            load.tenant(tenant, lambda: repeat(Ask(answer=40)))
    beside.tenant("cheats", lambda: repeat(Ask(answer=1, max_tokens=1600 - 16)))
    for load in (alone, beside):
        load.run(20_000)
    assert beside.placed["cheats"] > 10
    assert beside.spent["a"] > 0.6 * alone.spent["a"]
