"""What gateways know about a suspect when its engine dies: everything up to the last iteration."""

from functools import partial

import pytest

from motet.api.v1 import runner_pb2
from motet.clock import monotonic
from motet_runner.engine_loop import EngineLoop
from motet_runner.engine_messages import Add, Cancel
from motet_runner.interface import NewSequence, Sampling
from motet_simulator.fake_engine import FakeEngine, SlowEngines, tokens_of
from tests.runner_service.fake_peers import gateway_to, until
from tests.support.deadly_engine import DEADLY, DEADLY_ENGINE
from tests.support.in_process_runner import in_process_runner

SLOW = partial(FakeEngine, step_seconds=0.005, deadly=DEADLY)


def marks(gateway, request):
    return [one.alone for step in gateway.steps for one in step.progress if one.request == request]


@pytest.mark.parametrize("how", [{"engine": SLOW}, {"command": DEADLY_ENGINE}], ids=["thread", "process"])
async def test_an_engines_death_is_reported_with_the_request_that_was_alone_in_it(folder, how):
    async with in_process_runner(folder, **how) as runner, gateway_to(runner.address) as gateway:
        await gateway.submit("neighbour", max_tokens=2000)
        await until(lambda: gateway.tokens.get(("neighbour", 1)))
        await gateway.submit("suspect", prompt=(1, DEADLY), engines_lost=1)
        await until(lambda: gateway.error)
        assert marks(gateway, "suspect")[-1] is True
        assert not any(marks(gateway, "neighbour"))
        assert "engine has ended" in gateway.engine_died


async def test_a_suspect_that_can_be_computed_continues_with_others(folder):
    engines = SlowEngines()
    async with in_process_runner(folder, engine=engines) as runner, gateway_to(runner.address) as gateway:
        await gateway.submit("neighbour", max_tokens=100)
        await gateway.submit("suspect", max_tokens=40, engines_lost=1, seed=8)
        await until(lambda: gateway.tokens.keys() == {("neighbour", 1), ("suspect", 1)})
        engines.hurry()
        await gateway.finished("suspect")
        await gateway.finished("neighbour")
        assert gateway.tokens["suspect", 1] == tokens_of((1, 2, 3), 8, 40)
        assert gateway.tokens["neighbour", 1] == tokens_of((1, 2, 3), 7, 100)
        assert marks(gateway, "suspect").count(True) == 2
        assert marks(gateway, "suspect")[-1] is False


async def test_a_stopped_runner_does_not_say_that_its_engine_died(folder):
    async with in_process_runner(folder, engine=SLOW) as runner, gateway_to(runner.address) as gateway:
        await gateway.submit("a", max_tokens=2000)
        await until(lambda: gateway.tokens.get(("a", 1)))
        await runner.stop()
        await until(lambda: gateway.error)
        assert not gateway.engine_died


def test_a_lone_request_is_announced_before_its_iteration_and_revoked_after_it():
    loop = EngineLoop(FakeEngine(), clock=monotonic)
    one = NewSequence(request="a", epoch=1, prompt=(1, 2), promise=2, sampling=Sampling(max_tokens=9), engines_lost=1)
    loop.apply([Add(one, 1, monotonic())])
    said = []
    while (batch := loop.turn()) is not None:
        step = runner_pb2.GenerateDown.FromString(batch.steps[1]).step
        tokens = sum(len(sequence.tokens) for sequence in step.sequences)
        said.append((tokens, {progress.alone for progress in step.progress}, batch.report_now))
    assert [one for one in said if one[2]] == [(0, {True}, True), (1, {False}, True)] * 2
    assert sum(tokens for tokens, _, _ in said) == 9


@pytest.mark.parametrize("how", ["finished", "cancelled"])
def test_the_end_of_a_request_that_was_alone_is_sent_before_the_next_iteration(how):
    """Otherwise it would be blamed for a death that it did not cause."""
    loop = EngineLoop(FakeEngine(), clock=monotonic)
    one = NewSequence(request="a", epoch=1, prompt=(1, 2), promise=1, sampling=Sampling(max_tokens=1), engines_lost=1)
    loop.apply([Add(one, 1, monotonic())])
    told = loop.turn()
    assert told is not None
    assert told.report_now
    if how == "cancelled":
        loop.apply([Cancel(one.request, 1, 1, 0.0)])
    ended = loop.turn()
    assert ended is not None
    assert [end.finish.value for end in ended.ended] == ["length" if how == "finished" else "cancelled"]
    assert ended.report_now
