"""Class Batch is packed largest first, and nobody is passed over for long (S3-05)."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from motet.domain import RequestId
from motet.promises import pages_by_rule
from motet.runner_info import RequestClass
from motet_scheduler.policy import autoscaler, effects
from motet_scheduler.policy.requests import HEAD_START_PER_SIZE, SIZES_PER_DOUBLING
from motet_scheduler.policy.values import ScalingMode
from tests.scheduler.builders import GROUP, SchedulerDriver, pool, ready

PER_DOUBLING = SIZES_PER_DOUBLING * HEAD_START_PER_SIZE


def batch(driver: SchedulerDriver, name: str, tokens: int, **how) -> None:
    driver.enqueue(name, prompt=16, max_tokens=tokens - 16, request_class=RequestClass.BATCH, **how)


def full(pages: int = 16, **capacity) -> SchedulerDriver:
    """A runner whose pages one request holds: it is called `all`."""
    driver = ready()
    driver.attach(pages=pages, **capacity)
    driver.enqueue("all", prompt=16, max_tokens=pages * 16 - 16)
    return driver


def placed(driver: SchedulerDriver) -> list[str]:
    return [effect.request for effect in driver.of(effects.SendPlaced)]


def test_the_largest_goes_first_and_smaller_ones_take_the_rest():
    driver = full(16)
    for number, tokens in enumerate((64, 128, 32, 192)):
        batch(driver, f"b{number}-{tokens}", tokens)
    driver.finish("all")
    assert placed(driver) == ["b3-192", "b0-64"]


def test_other_classes_go_by_age():
    driver = full(16)
    for number, tokens in enumerate((64, 128, 192)):
        driver.enqueue(f"s{number}-{tokens}", prompt=16, max_tokens=tokens - 16)
    driver.finish("all")
    assert placed(driver) == ["s0-64", "s1-128"]


def test_the_size_is_the_prompt_and_what_is_expected():
    driver = full(16)
    batch(driver, "long-limit", 256, q80=16)
    batch(driver, "long-answer", 256, q80=200)
    driver.finish("all")
    assert placed(driver)[0] == "long-answer"


def test_an_old_request_goes_before_a_larger_one():
    driver = full(16)
    batch(driver, "small", 64)
    driver.wait(PER_DOUBLING - 1)
    batch(driver, "soon", 128)
    driver.wait(2)
    batch(driver, "late", 128)
    driver.finish("all")
    assert placed(driver) == ["soon", "small"]  # nothing has room for `late`, which is asked for too late


def test_a_stream_of_large_requests_keeps_a_small_one_back_for_a_bounded_time():
    driver = full(16)
    batch(driver, "small", 32)
    began, number = driver.clock(), 0
    batch(driver, "large-0", 256)
    driver.finish("all")
    while "small" not in placed(driver):
        number += 1
        batch(driver, f"large-{number}", 256)
        driver.wait(1.0)
        driver.finish(f"large-{number - 1}")
        assert driver.clock() - began <= 3 * PER_DOUBLING + 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 30), min_size=1, max_size=30), st.integers(4, 60))
def test_a_packing_is_within_one_request_of_the_best(pages, room):
    """No more than there is, and what is left is too little for the oldest of each size that waits."""
    driver = ready()
    for number, one in enumerate(pages):
        batch(driver, f"b{number}", one * 16)
    driver.attach(pages=room, max_sequences=64)
    driver.wait(1.0)
    runner = next(iter(driver.scheduler.runners.values()))
    assert runner.ledger.promised <= room
    queue = driver.scheduler.queues.get(GROUP)
    left = room - runner.ledger.promised
    for head in queue.heads() if queue is not None else ():
        need = pages_by_rule(
            runner.capacity.promise_rule,
            head.prompt_tokens,
            head.max_tokens,
            expected=0,
            context_tokens=4096,
            page_tokens=runner.capacity.page_tokens,
        )
        assert need > left, head.id


def test_an_offline_queue_fills_memory_as_well_as_the_best_of_three_orders():
    """The mean of promised pages while 400 requests end one after the other, against arrival and smallest first."""
    chance = random.Random(5)
    sizes = [chance.choice((2, 3, 5, 8, 13, 21, 34)) for _ in range(400)]
    filled = {}
    for order in ("largest", "arrival", "smallest"):
        driver = ready()
        driver.attach(pages=64, max_sequences=64)
        for number, size in enumerate(sorted(sizes) if order == "smallest" else sizes):
            how = RequestClass.BATCH if order == "largest" else RequestClass.STANDARD
            driver.enqueue(f"q{number}", prompt=16, max_tokens=size * 16 - 16, request_class=how)
        runner = next(iter(driver.scheduler.runners.values()))
        seen = []
        while driver.scheduler.queues.get(GROUP):
            seen.append(runner.ledger.promised)
            running = sorted(request for request, _ in runner.entries)
            driver.finish(RequestId(chance.choice(running)))
        filled[order] = sum(seen) / len(seen)
    assert filled["largest"] >= 0.95 * max(filled.values()), filled


def test_the_autoscaler_asks_how_long_the_oldest_has_waited(monkeypatch):
    """Not the one whose turn is next."""
    loads = []
    rule = autoscaler.required_replicas
    monkeypatch.setattr(autoscaler, "required_replicas", lambda load, **how: loads.append(load) or rule(load, **how))
    driver = full(4)
    driver.state(pools=(pool(scaling=ScalingMode.BUILTIN, min_replicas=1, max_replicas=4),))
    batch(driver, "small", 32)
    driver.wait(6.0)
    batch(driver, "large", 64)
    driver.wait(1.0)
    assert (loads[-1].waiting, loads[-1].waited) == (2, 7.0)
