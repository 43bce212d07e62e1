"""The last places of each runner are for a tenant that was given less than the others."""

from itertools import count
from random import Random
from unittest.mock import patch

import pytest

from motet.domain import Digest
from motet.runner_info import RequestClass, Tier
from motet_scheduler.policy import effects, events, placement, rooms
from motet_scheduler.policy.headroom import kept_on
from motet_scheduler.policy.values import Estimate
from tests.scheduler.builders import GROUP, PIRATE, POET, SchedulerDriver, adapter, entry, ready
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


@pytest.mark.parametrize("places", [3, 4])
def test_an_empty_runner_keeps_nothing_while_others_lack_last_places(places):
    driver = group(3)
    for n in range(3):
        driver.enqueue(f"a{n}", tenant="a", prompt=1, max_tokens=1)
    assert driver.scheduler.queues[GROUP].rooms.lacks()
    driver.attach("small", pages=1000, max_sequences=places)
    assert driver.scheduler.runners["small"].sequences == 1


def late_behind(large: int) -> SchedulerDriver:
    """A request of class Batch waits behind many that fit nowhere. It has room only among the last places of r0, and
    on r1 there is none."""
    driver = ready()
    driver.attach("r0", pages=120, max_sequences=32)
    driver.attach("r1", pages=8, max_sequences=8)
    driver.enqueue("a", tenant="a", prompt=1, max_tokens=15, request_class=RequestClass.INTERACTIVE)
    for n in range(139):
        driver.enqueue(f"b{n}", tenant="b", prompt=1, max_tokens=15, request_class=RequestClass.INTERACTIVE)
    for n in range(large):
        how = {"request_class": RequestClass.BATCH, "estimate": Estimate(q50=16, q80=100 * 16)}
        driver.enqueue(f"t{n}", tenant=f"t{n}", prompt=1, max_tokens=100 * 16 - 1, **how)
    driver.enqueue("small", tenant="z", prompt=1, max_tokens=31, request_class=RequestClass.BATCH)
    return driver


@pytest.mark.parametrize("large", [0, 40])
def test_a_late_class_finds_who_fits_however_many_do_not(large):
    driver = late_behind(large)
    for _ in range(45):
        assert finish_on(driver, "r1") != []
        if driver.where("small"):
            break
    assert driver.where("small") == "r0"


def test_while_a_class_is_late_and_fits_nowhere_few_are_tried():
    """Those of each adapter would be tried with each placement."""
    driver = ready()
    names = [f"a{n}" for n in range(40)]
    digests = [Digest(f"sha256:{n + 1:064x}") for n in range(40)]
    driver.state(*(adapter(name, max_replicas=1) for name in names))
    driver.attach("r0", pages=181, max_sequences=64, adapter_slots=100, resident=dict.fromkeys(digests, Tier.DEVICE))
    for name, digest in zip(names, digests, strict=True):
        instance = next(instance for instance, ref, _ in driver.orders if ref.name == name)
        driver.certify(name, digest, instance=instance)
    for n in range(60):
        how = {"request_class": RequestClass.BATCH, "estimate": Estimate(q50=16, q80=47)}
        driver.enqueue(f"long{n}", tenant="long", prompt=1, max_tokens=47, **how)
    driver.attach("r1", pages=128, max_sequences=64, adapter_slots=100)
    how = {"prompt": 1, "max_tokens": 31, "estimate": Estimate(q50=16, q80=31)}
    how["request_class"] = RequestClass.INTERACTIVE
    for n in range(140):
        driver.enqueue(f"b{n}", tenant="b", **how)
    for n, (name, digest) in enumerate(zip(names, digests, strict=True)):
        of_adapter = {"digest": digest, "adapter": f"default/{name}", "estimate": Estimate(q50=16, q80=1599)}
        driver.enqueue(f"s{n}", tenant=f"s{n}", prompt=1, max_tokens=1599, **of_adapter)
    for n in range(60):
        driver.enqueue(f"b{140 + n}", tenant="b", **how)
        driver.enqueue(f"c{n}", tenant="c", **how)
    assert driver.scheduler.queues[GROUP].class_queues[RequestClass.STANDARD].waiting.keys() == set(digests)

    def finish() -> list[str]:
        requests = driver.scheduler.requests.values()
        one = next(one for one in requests if one.tenant in {"b", "c"} and driver.where(one.id) == "r1")
        driver.send(events.RequestFinished("g0", one.id, one.epoch, 16))
        return [one.instance for one in driver.of(effects.SendPlaced)]

    for _ in range(20):
        finish()
    assert driver.scheduler.queues[GROUP].headroom.standing().late == (RequestClass.STANDARD,)
    with patch.object(placement, "choose", wraps=placement.choose) as tried:
        for _ in range(10):
            assert finish() == ["r1"]
    assert tried.call_count <= 50


def test_what_may_not_leave_the_last_pages_hides_nobody_who_may():
    """The runner keeps pages that only a very large request may have."""
    driver = ready(headroom_one_in=2, tenants_examined=2)
    driver.attach(pages=28, max_sequences=6, live=(entry("x", 5),))
    driver.enqueue("most", tenant="a", prompt=1, max_tokens=22 * 16 - 1, request_class=RequestClass.INTERACTIVE)
    driver.enqueue("a runs", tenant="a", prompt=1, max_tokens=15, request_class=RequestClass.INTERACTIVE)
    for n in range(3):
        driver.enqueue(f"mid{n}", tenant=f"m{n}", prompt=1, max_tokens=14 * 16 - 1)
    driver.enqueue("small", tenant="z", prompt=1, max_tokens=31)
    assert (driver.where("a runs"), driver.where("small")) == ("r0", "")
    driver.finish("most")
    assert driver.where("small") == "r0"


def test_those_who_may_leave_the_last_pages_do_not_hide_one_that_is_too_large_for_that():
    driver = ready(headroom_one_in=2, tenants_examined=2)
    driver.attach(pages=28, max_sequences=6, live=(entry("x", 5),))
    driver.enqueue("most", tenant="a", prompt=1, max_tokens=22 * 16 - 1, request_class=RequestClass.INTERACTIVE)
    driver.enqueue("a runs", tenant="a", prompt=1, max_tokens=15, request_class=RequestClass.INTERACTIVE)
    for n in range(3):
        driver.enqueue(f"mid{n}", tenant=f"m{n}", prompt=1, max_tokens=14 * 16 - 1)
    driver.enqueue("large", tenant="z", prompt=1, max_tokens=21 * 16 - 1)
    assert (driver.where("a runs"), driver.where("large")) == ("r0", "")
    driver.finish("most")
    assert driver.where("large") == "r0"


@pytest.mark.parametrize("runs_on", ["r0", "r1"])
def test_those_given_least_whose_adapter_has_no_slot_hide_nobody(runs_on):
    """The room of r0 is for them when the more urgent request has ended."""
    driver = ready(headroom_one_in=4, tenants_examined=2)
    driver.attach("r1", pages=2, max_sequences=4)
    driver.state(adapter("pirate"), adapter("poet"))
    driver.certify("poet", POET, instance="r1")
    urgent = {"tenant": "a", "prompt": 1, "request_class": RequestClass.INTERACTIVE}
    if runs_on == "r1":
        driver.enqueue("a", max_tokens=2 * 16 - 1, **urgent)
    live = tuple(entry(f"x{n}", 10, digest=PIRATE) for n in range(5))
    driver.attach("r0", pages=60, max_sequences=8, adapter_slots=1, live=live)
    if runs_on == "r0":
        driver.enqueue("a", max_tokens=9 * 16 - 1, **urgent)
    for n in range(5):
        how = {"digest": POET, "adapter": "default/poet"} if n < 4 else {}
        driver.enqueue(f"t{n}", tenant=f"t{n}", prompt=1, max_tokens=8 * 16 - 1, **how)
    assert (driver.where("a"), driver.where("t4")) == (runs_on, "")
    driver.finish("a")
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
    assert driver.where("t4") == "r0"


def test_all_of_those_given_least_are_tried_however_often_others_are_for_a_moment():
    """Each event tries two of them. Before the next one, a more urgent request comes and ends."""
    driver = ready(headroom_one_in=4, tenants_examined=2)
    driver.attach("r1", pages=2, max_sequences=4)
    driver.state(adapter("pirate"), adapter("poet"))
    driver.certify("poet", POET, instance="r1")
    urgent = {
        "tenant": "a",
        "prompt": 1,
        "max_tokens": 2 * 16 - 1,
        "request_class": RequestClass.INTERACTIVE,
        "avoid": ("r0",),
    }
    driver.enqueue("a", **urgent)
    live = tuple(entry(f"x{n}", 10, digest=PIRATE) for n in range(5))
    driver.attach("r0", pages=60, max_sequences=8, adapter_slots=1, live=live)
    for n in range(9):
        how = {"digest": POET, "adapter": "default/poet"} if n < 8 else {}
        driver.enqueue(f"t{n}", tenant=f"t{n}", prompt=1, max_tokens=8 * 16 - 1, **how)
    assert (driver.where("a"), driver.where("t8")) == ("r1", "")
    for _ in range(10):
        driver.finish("a")
        if driver.where("t8"):
            break
        driver.enqueue("a", **urgent)
        assert driver.where("a") == "r1"
    assert driver.where("t8") == "r0"


@pytest.mark.parametrize("asked", [0, rooms.MAX_ASKED])
def test_one_event_looks_at_few_of_those_given_least(asked, monkeypatch):
    """Where more runners have room than are `asked` for a slot, each is tried. Else none is that lacks a slot."""
    monkeypatch.setattr(rooms, "MAX_ASKED", asked)
    driver = ready(headroom_one_in=4, tenants_examined=2)
    driver.attach(
        "r0", pages=60, max_sequences=8, adapter_slots=1, live=tuple(entry("x", 10, digest=PIRATE) for _ in "x")
    )
    driver.state(adapter("pirate"), adapter("poet"))
    driver.certify("poet", POET)
    for n in range(20):
        driver.enqueue(f"t{n}", tenant=f"t{n}", prompt=1, max_tokens=1, digest=POET, adapter="default/poet")
    driver.enqueue("urgent", tenant="a", prompt=1, max_tokens=1, request_class=RequestClass.INTERACTIVE)
    assert driver.where("urgent") == "r0"
    with patch.object(placement, "choose", wraps=placement.choose) as tried:
        driver.finish("urgent")
        assert tried.call_count <= 4
        while driver.scheduler.more_to_try:
            driver.send(events.TryMore())
        assert tried.call_count == (0 if asked else 20), "and `TryMore` at the others"


def test_those_who_were_given_least_hide_no_smaller_request_of_another_one_of_them():
    driver = ready(headroom_one_in=2, tenants_examined=2)
    driver.attach(pages=40, max_sequences=8, live=tuple(entry(f"x{n}", 5) for n in range(4)))
    for tenant, pages in (("a", 20), ("c", 25), ("d", 25), ("b", 8)):
        driver.enqueue(tenant, tenant=tenant, prompt=1, max_tokens=pages * 16 - 1)
    assert (driver.where("a"), driver.where("b")) == ("r0", "")
    driver.finish("a")
    assert driver.where("b") == "r0"


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
