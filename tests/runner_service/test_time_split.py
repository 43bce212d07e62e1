"""A sequence's time on its runner: what the engine loop sends with its end (S3-20)."""

import pytest

from motet.api.v1 import common_pb2, runner_pb2
from motet.clock import FakeClock
from motet.domain import BASE, Digest, ParkMethod
from motet.time_split import PartSeconds
from motet_runner.adapters.layout import AdapterLayout, FileStamp
from motet_runner.engine_loop import EngineLoop
from motet_runner.engine_messages import Add, Cancel, LoadAdapter, Park, Resume, SetSupervised
from motet_runner.interface import NewSequence, Sampling
from motet_simulator.fake_engine import FakeEngine


class TimedEngine(FakeEngine):
    """Each iteration takes a second."""

    def __init__(self, clock, **settings):
        super().__init__(**settings)
        self.clock = clock

    def step(self):
        output = super().step()
        self.clock.advance(1)
        return output


class Loop:
    def __init__(self, **settings):
        self.clock = FakeClock(100.0)
        self.loop = EngineLoop(TimedEngine(self.clock, **settings), clock=self.clock)
        self.loop.apply([SetSupervised(supervised=True)])
        self.ends: dict[str, tuple[PartSeconds, PartSeconds]] = {}
        """What is sent to the gateway, and what the service gets."""
        self.progress: list[common_pb2.TimeSplit] = []

    def add(self, request, *, max_tokens=4, delivered=(), adapter=BASE, waited=0.0):
        new = NewSequence(
            request=request,
            epoch=1,
            prompt=(1, 2, 3),
            delivered=delivered,
            adapter=adapter,
            promise=1,
            sampling=Sampling(max_tokens=max_tokens),
        )
        self.loop.apply([Add(new, 1, self.clock() - waited)])

    def turns(self, count=20):
        for batch in filter(None, (self.loop.turn() for _ in range(count))):
            sent = {}
            for encoded in batch.steps.values():
                step = runner_pb2.GenerateDown.FromString(encoded).step
                sent |= {one.request: _seconds(one.split) for one in step.sequences if one.finish}
                assert not any(one.HasField("split") for one in step.sequences if not one.finish), (
                    "a token costs nothing"
                )
                self.progress += [one.split for one in step.progress]
            self.ends |= {one.request: (sent[one.request], one.split) for one in batch.ended}

    def end_of(self, request):
        sent, kept = self.ends[request]
        assert sent == kept
        return sent


def _seconds(split):
    assert split.overhead_seconds == 0
    return PartSeconds(split.queue_seconds, split.generation_seconds, split.penalty_seconds)


def test_a_request_that_waits_and_then_runs():
    loop = Loop()
    loop.add("a", waited=2.5)
    loop.turns()
    assert loop.end_of("a") == PartSeconds(queue=2.5, generation=4)


def test_an_answer_of_one_token_is_generated_although_it_begins_and_ends_in_one_iteration():
    loop = Loop()
    loop.add("a", max_tokens=1)
    loop.turns()
    assert loop.end_of("a") == PartSeconds(generation=1)


@pytest.mark.parametrize("method", ParkMethod)
def test_a_penalty_lasts_from_the_park_to_the_next_token(method):
    loop = Loop()
    loop.add("a", max_tokens=5)
    loop.turns(2)
    loop.loop.apply([Park("a", 1, 1, 1, method)])
    loop.turns(1)
    loop.clock.advance(10)
    loop.loop.apply([Resume("a", 1, 1)])
    loop.turns()
    assert loop.end_of("a") == PartSeconds(generation=2 + 2, penalty=1 + 10 + 1)


def test_a_request_from_another_runner_has_its_penalty_until_its_first_token_here():
    loop = Loop(max_sequences=1)
    loop.add("before", max_tokens=3)
    loop.add("a", delivered=(7, 8), max_tokens=5, waited=0.5)
    loop.turns()
    assert loop.end_of("before") == PartSeconds(generation=3)
    assert loop.end_of("a") == PartSeconds(penalty=0.5 + 3 + 1, generation=2)


def test_a_request_that_waits_for_its_adapter_is_in_the_queue():
    loop = Loop(load_steps=3)
    adapter = Digest("sha256:" + "a" * 64)
    loop.add("a", adapter=adapter, max_tokens=2)
    loop.turns(1)
    layout = AdapterLayout("", FileStamp(0, 0, 0), 1, 1, "")
    loop.clock.advance(5)
    loop.loop.apply([LoadAdapter(adapter, layout)])
    loop.turns()
    split = loop.end_of("a")
    assert split.queue >= 5 + 3
    assert (split.generation, split.penalty) == (2, 0)


def test_a_cancelled_request_has_its_time_until_the_cancel():
    loop = Loop()
    loop.add("a", max_tokens=9)
    loop.turns(3)
    loop.clock.advance(0.25)
    loop.loop.apply([Cancel("a", 1, 1, loop.clock())])
    loop.turns()
    assert loop.end_of("a") == PartSeconds(generation=3.25)


def test_each_change_of_state_says_the_time_so_far():
    loop = Loop()
    loop.add("a", max_tokens=9, waited=2)
    loop.turns(2)
    assert [(one.queue_seconds, one.generation_seconds) for one in loop.progress] == [(2, 1), (2, 1)]
