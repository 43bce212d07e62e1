"""What a slow gateway receives when it finally reads."""

import asyncio
import itertools

from motet.api.v1 import runner_pb2
from motet.clock import FakeClock, monotonic
from motet_runner.step_outbox import StepOutbox


def step(number, *sequences):
    down = runner_pb2.GenerateDown()
    down.step.number = number
    for request, index, token in sequences:
        down.step.sequences.add(request=request, epoch=1, index=index, tokens=[token])
    return down.SerializeToString()


def read(message):
    return runner_pb2.GenerateDown.FromString(message)


async def test_waiting_steps_are_sent_as_one_message_in_order():
    merged = itertools.count()
    outbox = StepOutbox(1 << 20, lambda: next(merged), clock=monotonic)
    for n in range(5):
        outbox.put(step(n, ("a", n, n * 10), ("b", n, n * 10 + 1)))
    down = read(await outbox.get())
    assert down.step.number == 4
    assert [(s.request, s.index) for s in down.step.sequences] == [(r, n) for n in range(5) for r in "ab"]
    assert next(merged) == 4


async def test_a_fast_gateway_gets_each_step_by_itself():
    merged = itertools.count()
    outbox = StepOutbox(1 << 20, lambda: next(merged), clock=monotonic)
    for n in range(3):
        outbox.put(step(n, ("a", n, n)))
        assert read(await outbox.get()).step.number == n
    assert next(merged) == 0


async def test_a_refusal_between_steps_keeps_its_place():
    outbox = StepOutbox(1 << 20, clock=monotonic)
    outbox.put(step(1, ("a", 0, 5)))
    outbox.put(runner_pb2.GenerateDown(declined=runner_pb2.SubmitDeclined(request="b")))
    outbox.put(step(2, ("a", 1, 6)))
    kinds = [read(await outbox.get()).WhichOneof("message") for _ in range(3)]
    assert kinds == ["step", "declined", "step"]


async def test_a_step_outbox_is_full_beyond_its_limit_until_it_is_read():
    outbox = StepOutbox(100, clock=monotonic)
    while not outbox.full:
        outbox.put(step(1, ("a", 0, 5)))
    await outbox.get()
    assert not outbox.full


async def test_a_reader_that_waits_is_woken():
    outbox = StepOutbox(100, clock=monotonic)
    reader = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    outbox.put(step(1, ("a", 0, 5)))
    assert read(await reader).step.number == 1


async def test_with_an_interval_steps_wait_for_those_that_follow_and_go_when_it_has_passed():
    outbox = StepOutbox(1 << 20, interval_seconds=0.02, clock=monotonic)
    outbox.put(step(0, ("a", 0, 5)))
    assert read(await outbox.get()).step.number == 0, "the first one is sent at once"
    outbox.put(step(1, ("a", 1, 6)))
    assert outbox.get_nowait() is None
    assert not outbox.empty
    outbox.put(step(2, ("a", 2, 7)))
    down = read(await outbox.get())
    assert [(s.index, list(s.tokens)) for s in down.step.sequences] == [(1, [6]), (2, [7])]
    assert outbox.empty


async def test_a_step_that_comes_after_the_interval_does_not_wait():
    clock = FakeClock()
    outbox = StepOutbox(1 << 20, interval_seconds=60, clock=clock)
    outbox.put(step(0, ("a", 0, 5)))
    await outbox.get()
    clock.advance(59)
    outbox.put(step(1, ("a", 1, 6)))
    assert outbox.get_nowait() is None

    later = StepOutbox(1 << 20, interval_seconds=60, clock=clock)
    later.put(step(0, ("a", 0, 5)))
    await later.get()
    clock.advance(60)
    later.put(step(1, ("a", 1, 6)))
    assert later.get_nowait() is not None


async def test_another_message_ends_the_wait_and_keeps_its_place():
    outbox = StepOutbox(1 << 20, interval_seconds=60, clock=monotonic)
    outbox.put(step(0, ("a", 0, 5)))
    await outbox.get()
    outbox.put(step(1, ("a", 1, 6)))
    reader = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    outbox.put(runner_pb2.GenerateDown(engine_died=runner_pb2.EngineDied(why="killed")))
    assert read(await reader).step.number == 1
    assert read(await outbox.get()).WhichOneof("message") == "engine_died"


async def test_a_step_after_another_message_does_not_let_it_wait():
    outbox = StepOutbox(1 << 20, interval_seconds=60, clock=monotonic)
    outbox.put(step(0, ("a", 0, 5)))
    await outbox.get()
    outbox.put(runner_pb2.GenerateDown(engine_died=runner_pb2.EngineDied(why="killed")))
    outbox.put(step(1, ("a", 1, 6)))
    assert read(await outbox.get()).WhichOneof("message") == "engine_died"
