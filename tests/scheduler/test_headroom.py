"""The last places of each runner are for a tenant that was given less than the others."""

from itertools import count
from random import Random

import pytest

from motet.runner_info import RequestClass
from motet_scheduler.policy import effects
from motet_scheduler.policy.headroom import kept_on
from tests.scheduler.builders import SchedulerDriver, entry, ready
from tests.scheduler.load import Ask, Load


def flooded(pages: int = 1000, **config) -> SchedulerDriver:
    """`b` fills a runner of 32 places, beside one request of `a`."""
    driver = ready(**config)
    driver.attach(pages=pages, max_sequences=32)
    driver.enqueue("a runs", tenant="a", prompt=1, max_tokens=1)
    for n in range(40):
        driver.enqueue(f"b{n}", tenant="b")
    return driver


def placed(driver: SchedulerDriver) -> int:
    return sum(not request.waiting for request in driver.scheduler.requests.values())


def test_the_last_place_is_for_the_tenant_that_was_given_less():
    driver = flooded()
    assert placed(driver) == 31
    driver.enqueue("a at once", tenant="a")
    assert driver.where("a at once") == "r0"
    driver.finish("b0")
    assert placed(driver) == 31, "a has fewer tokens than b, still"


def test_the_reason_of_a_request_that_may_not_have_the_last_place_says_so():
    driver = ready()
    driver.attach(pages=1000, max_sequences=32)
    driver.enqueue("a runs", tenant="a", prompt=1, max_tokens=1)
    for n in range(31):
        driver.enqueue(f"b{n}", tenant="b")
    (position,) = driver.of(effects.SendPosition)
    assert position.why == "the last places are kept for tenants that were given less"


def test_so_are_the_pages_of_a_request_of_mean_size():
    driver = ready()
    driver.attach(pages=320, max_sequences=64, max_model_length=8192)
    driver.enqueue("a runs", tenant="a", prompt=16, max_tokens=9 * 16)
    for n in range(40):
        driver.enqueue(f"b{n}", tenant="b", prompt=16, max_tokens=9 * 16)
    assert placed(driver) == 31
    driver.enqueue("a at once", tenant="a", prompt=16, max_tokens=9 * 16)
    assert driver.where("a at once") == "r0"


def group(runners: int) -> SchedulerDriver:
    """As `flooded`, but for the number of runners."""
    driver = ready()
    for n in range(runners):
        driver.attach(f"r{n}", pages=1000, max_sequences=32)
    driver.enqueue("a runs", tenant="a", prompt=1, max_tokens=1)
    for n in range(40 * runners):
        driver.enqueue(f"b{n}", tenant="b")
    assert placed(driver) == 31 * runners
    return driver


def finish_on(driver: SchedulerDriver, instance: str) -> list[str]:
    """One of `b`. Returns where others are placed."""
    requests = driver.scheduler.requests.values()
    driver.finish(next(one.id for one in requests if one.tenant == "b" and driver.where(one.id) == instance))
    return [one.instance for one in driver.of(effects.SendPlaced)]


def test_another_runner_makes_up_for_a_last_place_in_use():
    driver = group(2)
    driver.enqueue("a too", tenant="a", prompt=1, max_tokens=1)
    lacks = driver.where("a too")
    other = "r1" if lacks == "r0" else "r0"
    assert finish_on(driver, other) == []
    assert finish_on(driver, lacks) == [other], "it has its last place again, and the other one has two"


def test_in_a_large_group_those_of_other_runners_are_enough():
    driver = group(5)
    driver.enqueue("a too", tenant="a", prompt=1, max_tokens=1)
    other = next(name for name in ("r0", "r1") if name != driver.where("a too"))
    assert finish_on(driver, other) == [other]


def test_one_tenant_alone_has_all_places():
    driver = flooded()
    driver.finish("a runs")
    assert placed(driver) == 32


def test_a_runner_with_few_places_keeps_none():
    driver = ready()
    driver.attach(pages=1000, max_sequences=31)
    driver.enqueue("a runs", tenant="a", prompt=1, max_tokens=1)
    for n in range(40):
        driver.enqueue(f"b{n}", tenant="b")
    assert placed(driver) == 31


def test_a_runner_with_pages_for_few_keeps_none():
    driver = ready()
    driver.attach(pages=100, max_sequences=64, live=(entry("x", 10), entry("y", 10)))
    (runner,) = driver.scheduler.runners.values()
    assert kept_on(runner, 32) == (0, 0)
    assert kept_on(runner, 5) == (2, 20)


def test_what_a_tenant_alone_may_have_others_may_have_when_they_were_given_less():
    """The last place goes to whoever is behind, as soon as nobody is further behind."""
    driver = ready()
    driver.attach("r0", pages=1000, max_sequences=32)
    driver.attach("r1", pages=1000, max_sequences=32)
    driver.enqueue("a runs", tenant="a", prompt=1, max_tokens=1)
    for n in range(80):
        driver.enqueue(f"b{n}", tenant="b")
        driver.enqueue(f"c{n}", tenant="c")
    assert placed(driver) == 62
    driver.finish("a runs")
    running = [one.tenant for one in driver.scheduler.requests.values() if not one.waiting]
    assert len(running) == 64, "b and c are equal, or nearly"


@pytest.mark.parametrize("fits_at_once", [True, False])
def test_a_request_that_can_never_leave_it_runs_beside_a_small_one(fits_at_once):
    """Else it would wait for it on a runner that is nearly idle."""
    driver = ready(headroom_one_in=8)
    driver.attach(pages=320, max_sequences=64, max_model_length=8192)
    driver.enqueue("small", tenant="b", prompt=60, max_tokens=16)
    driver.enqueue("before", tenant="a", prompt=1000, max_tokens=16)
    driver.finish("before")
    if not fits_at_once:
        driver.enqueue("in the way", tenant="a", prompt=400, max_tokens=16)
    driver.enqueue("large", tenant="a", prompt=4950, max_tokens=16)
    assert driver.where("large") == ("r0" if fits_at_once else "")
    if not fits_at_once:
        driver.finish("in the way")
        assert driver.where("large") == "r0"


def test_it_is_kept_for_the_most_urgent_class():
    driver = ready()
    driver.attach(pages=1000, max_sequences=32)
    driver.enqueue("a runs", tenant="a", prompt=1, max_tokens=1, request_class=RequestClass.INTERACTIVE)
    for n in range(40):
        driver.enqueue(f"b{n}", tenant="b")
    assert placed(driver) == 31
    driver.enqueue("a at once", tenant="a", request_class=RequestClass.INTERACTIVE)
    assert driver.where("a at once") == "r0"


def test_who_was_tried_before_gets_the_last_place_when_a_less_urgent_placement_makes_it_his():
    """`t` pays for its request of another class: now `u` was given less."""
    driver = ready()
    driver.attach("r0", pages=1000, max_sequences=32, live=tuple(entry(f"x{n}", 2) for n in range(29)))
    driver.attach("r1", pages=4, max_sequences=8)
    driver.enqueue("t runs", tenant="t", prompt=1, max_tokens=1, request_class=RequestClass.INTERACTIVE)
    driver.enqueue("u runs", tenant="u", prompt=1, max_tokens=4, request_class=RequestClass.INTERACTIVE)
    driver.enqueue("u waits", tenant="u", prompt=100, request_class=RequestClass.INTERACTIVE)
    assert (driver.where("t runs"), driver.where("u runs"), driver.where("u waits")) == ("r0", "r0", "")
    driver.enqueue("t too", tenant="t", prompt=16, max_tokens=16)
    assert (driver.where("t too"), driver.where("u waits")) == ("r1", "r0")


def test_who_was_tried_before_gets_room_that_a_less_urgent_placement_frees_of_being_kept():
    """A small request makes the mean of all smaller, by which pages are kept."""
    driver = ready(headroom_one_in=4)
    driver.attach(pages=400, max_sequences=16, live=tuple(entry(f"x{n}", 20) for n in range(6)), max_model_length=8192)
    driver.enqueue("t runs", tenant="t", prompt=1, max_tokens=1, request_class=RequestClass.INTERACTIVE)
    driver.enqueue("u runs", tenant="u", prompt=1, max_tokens=4, request_class=RequestClass.INTERACTIVE)
    driver.enqueue("u waits", tenant="u", prompt=1, max_tokens=222 * 16 - 1, request_class=RequestClass.INTERACTIVE)
    assert driver.where("u waits") == ""
    driver.enqueue("small", tenant="v", prompt=1, max_tokens=1, request_class=RequestClass.BATCH)
    assert (driver.where("small"), driver.where("u waits")) == ("r0", "r0")


def test_a_reserved_runner_keeps_nothing_from_the_request_that_it_is_reserved_for():
    """`c` was given more than `b`, and its request has room only in what the runner keeps."""
    driver = ready(max_passed_over=1, headroom_one_in=4)
    driver.attach(pages=100, max_sequences=16, live=(entry("x", 10), entry("y", 10)))
    for n in range(2):
        driver.enqueue(f"b{n}", tenant="b", prompt=1, max_tokens=15)
        driver.enqueue(f"c{n}", tenant="c", prompt=1, max_tokens=30)
        driver.enqueue(f"d{n}", tenant="d", prompt=1, max_tokens=45)
    driver.enqueue("large", tenant="c", prompt=1, max_tokens=60 * 16)
    assert driver.where("large") == "", "b may need the pages"
    driver.enqueue("passes it", tenant="d", prompt=1, max_tokens=15)
    assert (driver.where("passes it"), driver.where("large")) == ("r0", "r0")


@pytest.mark.parametrize("one_in", [0, 32])
def test_a_tenant_within_its_share_waits_for_nobody_else(one_in):
    """How many of its requests must wait beside a flood."""
    load = Load(max_sequences=32, config={"headroom_one_in": one_in})
    chance = Random(1)
    load.tenant("b", lambda: (Ask(answer=chance.randrange(1, 32)) for _ in count()), backlog=40)
    load.run(200)  # until the mean of answers is known
    waited = []
    for _ in range(200):
        load.run(1.5)
        before = load.placed["a"]
        load.ask("a", Ask(answer=12))
        waited.append(load.placed["a"] == before)
    assert (sum(waited) < 10) == (one_in > 0), sum(waited)
