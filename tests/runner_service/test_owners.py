"""Gateways that lie to a runner: they speak of requests of another gateway, and of terms that no scheduler has."""

from contextlib import asynccontextmanager

import pytest

from motet.api.v1 import common_pb2, runner_pb2, scheduler_pb2
from motet.domain import BASE, RequestId
from motet.errors import Declined
from motet_runner.accepted_requests import MAX_ACCEPTED, MAX_EPOCHS_REMEMBERED, AcceptedRequest, AcceptedRequests
from motet_runner.engine_messages import EngineOutputs, SequenceRefused
from motet_simulator.fake_engine import SlowEngines, tokens_of
from tests.runner_service.fake_peers import gateway_to, scheduler_at, until
from tests.support.in_process_runner import in_process_runner

TOKENS = 60
ANSWER = tokens_of((1, 2, 3), 7, TOKENS)
HIGHEST_EPOCH = 2**31


@asynccontextmanager
async def all_parts(folder):
    """A scheduler that has welcomed a runner, its engine, the gateway whose request it is, and a liar."""
    address, engines = f"unix:{folder}/s.sock", SlowEngines()
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=engines) as runner,
        gateway_to(runner.address, "honest") as honest,
        gateway_to(runner.address, "liar") as liar,
    ):
        await until(lambda: runner.service.accepted.highest_term == 1)
        yield scheduler, runner, engines, honest, liar


def announce(scheduler, runner, request, epoch=1, gateway="honest"):
    expect = scheduler_pb2.Expect(term=scheduler.term, request=request, epoch=epoch, gateway=gateway)
    scheduler.send(scheduler_pb2.AttachDown(expect=expect))
    return until(lambda: runner.service.accepted.is_anothers(request, "liar"))


async def heard(gateway):
    """Until the runner has handled all that this gateway has sent."""
    await gateway.submit("last", choices=2)
    await gateway.refusal("last")


@pytest.mark.parametrize("term", [2, 2**31, 2**32, 2**63])
async def test_a_term_of_a_gateway_makes_no_scheduler_a_former_one(folder, term):
    async with all_parts(folder) as (scheduler, runner, engines, honest, liar):
        await liar.submit("its own", term=term)
        await heard(liar)
        scheduler.send(scheduler_pb2.AttachDown(drain=scheduler_pb2.Drain(term=1)))
        await until(lambda: runner.service.draining)
        scheduler.send(scheduler_pb2.AttachDown(take_work=scheduler_pb2.TakeWork(term=1)))
        await until(lambda: not runner.service.draining)
        engines.hurry()
        await honest.submit("a", term=1)
        await honest.finished("a")
        assert runner.service.accepted.highest_term == 1


async def test_a_gateway_that_hears_first_of_a_new_leader_is_served_at_once(folder):
    async with all_parts(folder) as (scheduler, runner, engines, honest, _):
        engines.hurry()
        await honest.submit("a", term=2)
        await honest.finished("a")
        scheduler.send(scheduler_pb2.AttachDown(welcome=common_pb2.Welcome(term=2)))
        await until(lambda: runner.service.accepted.highest_term == 2)
        await honest.submit("b", term=1)
        declined = await honest.refusal("b")
        assert (declined.failure.code, declined.term) == ("declined", 1)


@pytest.mark.parametrize("epoch", [1, 2, HIGHEST_EPOCH])
@pytest.mark.parametrize("announced", [False, True], ids=["submitted", "announced"])
async def test_a_gateway_ends_no_request_of_another_one(folder, epoch, announced):
    async with all_parts(folder) as (scheduler, runner, engines, honest, liar):
        if announced:
            await announce(scheduler, runner, "a")
        await honest.submit("a", max_tokens=TOKENS)
        await until(lambda: honest.tokens.get(("a", 1)))
        await liar.cancel("a", epoch)
        await liar.submit("a", epoch=epoch, max_tokens=TOKENS)
        assert (await liar.refusal("a", epoch)).failure.code == "declined"
        engines.hurry()
        await honest.finished("a")
        assert honest.tokens["a", 1] == ANSWER
        assert not liar.tokens
        assert not scheduler.of("declined"), "what a liar submits is not what the scheduler has placed"


async def test_a_gateway_says_of_its_own_request_on_any_of_its_streams(folder):
    async with all_parts(folder) as (_, runner, _engines, honest, _):
        await honest.submit("a", max_tokens=TOKENS)
        await until(lambda: honest.tokens.get(("a", 1)))
        async with gateway_to(runner.address, "honest") as again:
            await again.cancel("a")
            assert (await honest.finished("a")).finish == common_pb2.FINISH_REASON_CANCELLED


@pytest.mark.parametrize("runs", [True, False], ids=["it runs", "it has ended"])
async def test_what_a_liar_submits_first_does_not_count_once_the_scheduler_has_said_whose_it_is(folder, runs):
    async with all_parts(folder) as (scheduler, runner, engines, honest, liar):
        if not runs:
            engines.hurry()
        await liar.submit("a", epoch=HIGHEST_EPOCH, max_tokens=TOKENS)
        await until(lambda: liar.tokens.get(("a", HIGHEST_EPOCH)))
        if not runs:
            await liar.finished("a", HIGHEST_EPOCH)
        await announce(scheduler, runner, "a")
        engines.hurry()
        await honest.submit("a", max_tokens=TOKENS)
        await honest.finished("a")
        assert honest.tokens["a", 1] == ANSWER


async def test_the_scheduler_hears_of_no_decline_of_what_another_gateway_has_submitted(folder):
    """The engine refuses the liar's, which came before the scheduler has said whose it is."""
    async with all_parts(folder) as (scheduler, runner, _, _honest, liar):
        await liar.submit("a", max_tokens=TOKENS)
        await until(lambda: liar.tokens.get(("a", 1)))
        await announce(scheduler, runner, "a")
        stream = runner.service.accepted.get("a").stream
        runner.service.loaded.on_batch(
            EngineOutputs(refused=[SequenceRefused(RequestId("a"), 1, stream, Declined("no pages"))])
        )
        assert (await liar.refusal("a")).failure.message == "no pages"
        reports = len(scheduler.of("report"))
        await until(lambda: len(scheduler.of("report")) > reports)
        assert not scheduler.of("declined")


def test_whose_a_request_is_holds_for_as_long_as_it_runs():
    book = AcceptedRequests()
    book.add(accepted("a"))
    book.add(accepted("b"))
    book.remove("b", 1, 1)
    for number in range(MAX_EPOCHS_REMEMBERED):
        book.add(accepted(f"{number}", gateway="liar"))
    assert book.is_anothers("a", "liar")
    assert not book.is_anothers("b", "liar"), "it ended long ago"


def accepted(request, gateway="honest"):
    submit = runner_pb2.Submit()
    return AcceptedRequest(RequestId(request), 1, submit.promise, 3, 0, "", BASE, 0, gateway, 1)


def test_a_scheduler_of_an_earlier_version_does_not_say_whose_it_is():
    book = AcceptedRequests()
    book.expect("a", 1)
    assert not book.is_anothers("a", "honest")
    book.expect("b", 1, "honest")
    book.expect("b", 2)
    assert book.is_anothers("b", "liar")


def test_a_runner_accepts_no_more_requests_than_its_reports_may_list():
    """Else one gateway could fill it, and all that it reports would be refused."""
    book = AcceptedRequests()
    for number in range(MAX_ACCEPTED):
        book.add(accepted(f"{number}"))
    with pytest.raises(Declined, match="the most that it accepts"):
        book.check(runner_pb2.Submit(request="one more", epoch=1))
    book.check(runner_pb2.Submit(request="0", epoch=2))


def test_the_users_of_an_adapter_are_counted_as_requests_come_and_go():
    def accepted(request, epoch, adapter):
        return AcceptedRequest(request, epoch, common_pb2.Promise(pages=1), 1, 0, "acme", adapter, 0, "gateway", 1)

    book = AcceptedRequests()
    for one in (accepted("a", 1, "x"), accepted("b", 1, "x"), accepted("a", 2, "y"), accepted("b", 2, "x")):
        book.add(one)
    assert [book.users_of(adapter) for adapter in "xyz"] == [1, 1, 0]
    assert book.remove("a", 1, 1) is None
    assert book.remove("b", 2, 1) is not None
    assert [book.users_of(adapter) for adapter in "xyz"] == [0, 1, 0]
