"""What a slow gateway receives when it finally reads."""

import asyncio
import itertools

from motet.api.v1 import runner_pb2
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
    outbox = StepOutbox(1 << 20, lambda: next(merged))
    for n in range(5):
        outbox.put(step(n, ("a", n, n * 10), ("b", n, n * 10 + 1)))
    down = read(await outbox.get())
    assert down.step.number == 4
    assert [(s.request, s.index) for s in down.step.sequences] == [(r, n) for n in range(5) for r in "ab"]
    assert next(merged) == 4


async def test_a_fast_gateway_gets_each_step_by_itself():
    merged = itertools.count()
    outbox = StepOutbox(1 << 20, lambda: next(merged))
    for n in range(3):
        outbox.put(step(n, ("a", n, n)))
        assert read(await outbox.get()).step.number == n
    assert next(merged) == 0


async def test_a_refusal_between_steps_keeps_its_place():
    outbox = StepOutbox(1 << 20)
    outbox.put(step(1, ("a", 0, 5)))
    outbox.put(runner_pb2.GenerateDown(declined=runner_pb2.SubmitDeclined(request="b")))
    outbox.put(step(2, ("a", 1, 6)))
    kinds = [read(await outbox.get()).WhichOneof("message") for _ in range(3)]
    assert kinds == ["step", "declined", "step"]


async def test_a_step_outbox_is_full_beyond_its_limit_until_it_is_read():
    outbox = StepOutbox(100)
    while not outbox.full:
        outbox.put(step(1, ("a", 0, 5)))
    await outbox.get()
    assert not outbox.full


async def test_a_reader_that_waits_is_woken():
    outbox = StepOutbox(100)
    reader = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    outbox.put(step(1, ("a", 0, 5)))
    assert read(await reader).step.number == 1
