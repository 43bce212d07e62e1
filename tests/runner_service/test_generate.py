"""Runner.Generate over real gRPC: what only the real runner does. `tests/contract/test_runners.py` has what the gateway
tests' small runner does, too."""

import asyncio
import functools
import threading
from contextlib import suppress
from dataclasses import replace

import grpc
import psutil
import pytest
from structlog.testing import capture_logs

from motet.api.v1 import common_pb2, runner_pb2, runner_pb2_grpc, scheduler_pb2
from motet.domain import BASE, RequestId
from motet.errors import TOO_FEW_PAGES, Declined
from motet.prefix_hints import prefix_salt
from motet.transport.over_grpc import is_healthy, open_channel
from motet_gateway.estimator import longest
from motet_runner import generate_service
from motet_runner.engine_client import EngineClient
from motet_runner.engine_messages import Add, EngineOutputs, SequenceRefused
from motet_runner.generate_service import sequence_of
from motet_simulator.fake_engine import FakeEngine, SlowEngines, token_at, tokens_of
from tests.common.waiting import PATIENCE_S
from tests.runner_service.fake_peers import gateway_to, scheduler_at, until
from tests.support.deadly_engine import DEADLY, dying_engine, exits_with_the_drivers_status, fails, fails_and_stays
from tests.support.in_process_runner import in_process_runner
from tests.support.metric_values import value_of

STREAM_IS_OVER = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""The errors of a gateway's write after the runner has ended the stream: during the write, and later."""

SLOW = functools.partial(FakeEngine, step_seconds=0.02)
"""With such steps, an answer of 2000 tokens lasts until the test ends it."""


async def test_a_step_is_one_message_with_all_sequences_of_a_gateway(folder):
    engines = SlowEngines()
    async with in_process_runner(folder, engine=engines) as runner, gateway_to(runner.address) as gateway:
        for n in range(8):
            await gateway.submit(f"r{n}", max_tokens=30, seed=n)
        await until(lambda: len(gateway.tokens) == 8)
        engines.hurry()
        for n in range(8):
            await gateway.finished(f"r{n}")
            assert gateway.tokens[f"r{n}", 1] == tokens_of((1, 2, 3), n, 30)
        assert max(len(step.sequences) for step in gateway.steps) >= 8
        assert len(gateway.steps) < 80


async def test_the_engine_is_told_the_parent_and_what_may_share_pages(folder):
    added = []

    class RecordingEngine(FakeEngine):
        def add(self, sequence):
            added.append(sequence)
            super().add(sequence)

    address = f"unix:{folder}/s.sock"
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=RecordingEngine) as runner,
        gateway_to(runner.address) as gateway,
    ):
        (hello,) = await until(lambda: scheduler.of("hello"))
        await gateway.submit("a")
        await gateway.finished("a")
        await gateway.submit("a.1", parent="a")
        await gateway.finished("a.1")
    assert [sequence.parent for sequence in added] == [None, "a"]
    assert {sequence.prefix_salt for sequence in added} == {prefix_salt(hello.base.digest, BASE, "default")}


async def test_a_log_line_about_a_request_names_its_trace(folder):
    engines = SlowEngines()
    with capture_logs() as logs:
        async with in_process_runner(folder, engine=engines) as runner, gateway_to(runner.address) as gateway:
            for _ in range(2):
                await gateway.submit("a", traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
            await gateway.submit("b", traceparent="b" * 1000)
            await gateway.submit("b")
            # Not faster before: a submit that comes after the answer's end begins another one.
            await until(lambda: len(duplicates(logs)) == 2)
            engines.hurry()
            await gateway.finished("b")
    assert [(line["request"], line.get("trace")) for line in duplicates(logs)] == [("a", "a" * 32), ("b", None)]


def duplicates(logs):
    return [line for line in logs if line["event"] == "duplicate_submit"]


async def test_a_decline_of_the_engine_reaches_gateway_and_scheduler(folder):
    address = f"unix:{folder}/s.sock"
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=SlowEngines(pages=8)) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await until(lambda: scheduler.of("hello"))
        await gateway.submit("first", max_tokens=100, term=3)
        await gateway.submit("a", max_tokens=100, term=3)
        declined = await gateway.refusal("a")
        assert (declined.failure.code, declined.term) == ("declined", 3)
        (up,) = await until(lambda: scheduler.of("declined"))
        assert (up.request, up.epoch, up.failure.code) == ("a", 1, "declined")
        assert up.failure.reason == TOO_FEW_PAGES
        assert [one.request for one in runner.service.accepted] == ["first"]


async def test_sequences_of_a_lost_gateway_end_after_the_grace(folder):
    async with in_process_runner(folder, engine=SLOW) as runner:
        async with gateway_to(runner.address) as gateway:
            await gateway.submit("a", max_tokens=2000)
            await until(lambda: gateway.tokens.get(("a", 1)))
        await until(lambda: len(runner.service.accepted) == 0)


async def test_a_resubmitted_request_survives_the_loss_of_its_first_stream(folder):
    engines = SlowEngines()
    async with in_process_runner(folder, engine=engines, gateway_grace_seconds=1000) as runner:
        async with gateway_to(runner.address) as first:
            await first.submit("a", max_tokens=60)
            have = await until(lambda: first.tokens.get(("a", 1)))
        async with gateway_to(runner.address) as second:
            await second.submit("a", epoch=2, max_tokens=60, delivered=tuple(have))
            await until(lambda: second.tokens.get(("a", 2)))
            engines.hurry()
            await second.finished("a", 2)
            assert have + second.tokens["a", 2] == tokens_of((1, 2, 3), 7, 60)


async def test_a_draining_runner_takes_nothing_new_and_finishes_what_it_has(folder):
    address = f"unix:{folder}/s.sock"
    engines = SlowEngines()
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=engines) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await gateway.submit("a", max_tokens=60)
        await until(lambda: gateway.tokens.get(("a", 1)) and scheduler.of("hello"))
        scheduler.send(scheduler_pb2.AttachDown(drain=scheduler_pb2.Drain(term=1)))
        await until(lambda: runner.service.draining)
        await gateway.submit("b")
        assert "draining" in (await gateway.refusal("b")).failure.message
        engines.hurry()
        await gateway.finished("a")
        assert await is_healthy(runner.address)


async def test_the_scheduler_can_cancel(folder):
    address = f"unix:{folder}/s.sock"
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=SLOW) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await gateway.submit("a", max_tokens=2000)
        await until(lambda: gateway.tokens.get(("a", 1)) and scheduler.of("hello"))
        for epoch in (2, 1):  # the first one names a placement that this runner does not have
            order = scheduler_pb2.CancelRequest(term=1, request="a", epoch=epoch)
            scheduler.send(scheduler_pb2.AttachDown(cancel=order))
        assert (await gateway.finished("a")).finish == common_pb2.FINISH_REASON_CANCELLED
        assert len(runner.service.accepted) == 0
        await gateway.submit("a", epoch=2)  # the order has overtaken it
        refused = await gateway.refusal("a", epoch=2)
        assert refused.failure.message.endswith("The epoch 2 is over, and 3 is the first that counts.")
        await gateway.submit("a", epoch=3)
        await until(lambda: gateway.tokens.get(("a", 3)))


async def test_a_cancel_voids_no_other_placement(folder):
    """A report may have named an epoch that no scheduler gave, far ahead."""
    address = f"unix:{folder}/s.sock"
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=SLOW) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await gateway.submit("a", max_tokens=2000)
        await until(lambda: gateway.tokens.get(("a", 1)) and scheduler.of("hello"))
        for epoch in (1002, 1):
            order = scheduler_pb2.CancelRequest(term=1, request="a", epoch=epoch)
            scheduler.send(scheduler_pb2.AttachDown(cancel=order))
        assert (await gateway.finished("a")).finish == common_pb2.FINISH_REASON_CANCELLED
        await gateway.submit("a", epoch=2)
        await until(lambda: gateway.tokens.get(("a", 2)))


async def test_a_gateway_that_does_not_read_is_dropped_and_delays_no_other(folder):
    engine = functools.partial(FakeEngine, pages=1 << 20, max_model_length=1 << 20)
    async with (
        in_process_runner(folder, engine=engine, outbox_kib=16) as runner,
        gateway_to(runner.address, "good") as good,
        gateway_to(runner.address, "deaf", deaf=True) as deaf,
    ):
        for n in range(16):
            with suppress(*STREAM_IS_OVER):  # it may be dropped before it has sent everything
                await deaf.submit(f"d{n}", max_tokens=1_000_000)
        await good.submit("a", max_tokens=50)
        await good.finished("a")
        await until(lambda: len(runner.service.loaded.generation.streams) == 1)
        await until(lambda: len(runner.service.accepted) == 0)
        await good.submit("b")
        await good.finished("b")
        async with asyncio.timeout(PATIENCE_S):
            await deaf.read()  # at last
        assert deaf.error.code() is grpc.StatusCode.UNAVAILABLE
        assert "connect again" in deaf.error.details()


async def test_with_a_stream_interval_all_tokens_come_in_fewer_messages(folder):
    engine = functools.partial(FakeEngine, step_seconds=0.001)
    async with (
        in_process_runner(folder, engine=engine, stream_interval_seconds=0.02) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await gateway.submit("a", max_tokens=64)
        finish = (await gateway.finished("a")).finish
        merged = value_of(runner.service.metrics.merged_steps)
    assert finish == common_pb2.FINISH_REASON_LENGTH
    assert gateway.tokens[("a", 1)] == tokens_of((1, 2, 3), 7, 64)
    assert merged > 16


@pytest.mark.parametrize(
    ("how", "status"),
    [
        (fails, "exit status 1"),
        (exits_with_the_drivers_status, "exit status 70"),
        (fails_and_stays, "it closed its connection"),
    ],
)
async def test_a_device_that_fails_ends_the_service_and_its_gateways_hear_why(folder, how, status):
    async with (
        in_process_runner(folder, command=dying_engine(how)) as runner,
        gateway_to(runner.address) as gateway,
    ):
        engine = psutil.Process(runner.host.pid)
        await gateway.submit("a", prompt=(DEADLY,))
        async with asyncio.timeout(PATIENCE_S):
            error = await runner.ended()
        assert type(error).__name__ == "EngineDied"
        await until(lambda: gateway.engine_died)
        assert gateway.engine_died == error.message == f"The engine has ended: {status}."
        await until(lambda: not engine.is_running())


async def test_a_runner_that_still_loads_serves_nothing(folder):
    may_load, loaded, may_end = threading.Event(), asyncio.Event(), asyncio.Event()

    def load():
        may_load.wait()
        return FakeEngine()

    async def live():
        async with in_process_runner(folder, engine=load):
            loaded.set()
            await may_end.wait()

    address = f"unix:{folder}/r0.sock"
    living = asyncio.create_task(live())
    try:
        await until((folder / "r0.sock").exists)
        assert not await is_healthy(address)
        async with open_channel(address) as channel:
            call = runner_pb2_grpc.RunnerStub(channel).Assets(
                runner_pb2.AssetsRequest(digest="any"), timeout=PATIENCE_S
            )
            with pytest.raises(grpc.aio.AioRpcError, match="still loading") as caught:
                await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        may_load.set()
        async with asyncio.timeout(PATIENCE_S):
            await loaded.wait()
        assert await is_healthy(address)
    finally:
        may_load.set()
        may_end.set()
        await living


@pytest.mark.parametrize(
    ("said", "read"),
    [((20, 30, 40, 50), (20, 30, 40, 50)), ((0, 0, 0, 0), None), ((20, 10, 40, 50), None), ((0, 1, 1, 1), None)],
)
def test_quantiles_that_no_lengths_have_are_no_estimate(said, read):
    estimate = common_pb2.Estimate(**dict(zip(("q50", "q80", "q90", "q95"), said, strict=True)))
    submit = runner_pb2.Submit(request="a", choices=[runner_pb2.Choice()], prompt_ids=[1], estimate=estimate)
    assert generate_service.sequence_of(submit, tuple(submit.prompt_ids), base_digest="").quantiles == read


def test_the_most_tokens_of_an_answer_are_no_estimate_of_its_length():
    submit = runner_pb2.Submit(request="a", choices=[runner_pb2.Choice()], prompt_ids=[1], estimate=longest(100))
    assert generate_service.sequence_of(submit, tuple(submit.prompt_ids), base_digest="").quantiles is None


def test_a_gateway_that_does_not_say_who_drew_a_seed_has_it_from_the_client():
    submit = runner_pb2.Submit(request="a", choices=[runner_pb2.Choice()], prompt_ids=[1], seed=7)
    for said, drawn in ((b"", False), (runner_pb2.Submit(seed_is_drawn=True).SerializeToString(), True)):
        submit.MergeFromString(said)
        sequence = generate_service.sequence_of(submit, tuple(submit.prompt_ids), base_digest="")
        assert (sequence.seed, sequence.seed_is_drawn) == (7, drawn)


@pytest.mark.parametrize(("said", "counts"), [(0, 1), (7, 7), (2**32 - 1, 1000)])
def test_a_weight_of_an_earlier_gateway_is_1_and_none_is_above_the_largest(said, counts):
    submit = runner_pb2.Submit(request="a", choices=[runner_pb2.Choice()], prompt_ids=[1], tenant="acme", weight=said)
    sequence = generate_service.sequence_of(submit, tuple(submit.prompt_ids), base_digest="")
    assert (sequence.tenant, sequence.weight) == ("acme", counts)


async def test_choices_of_one_prompt_get_it_once(folder):
    """Also if the first one has ended or was refused."""
    prompt = tuple(range(5, 45))
    async with in_process_runner(folder) as runner, gateway_to(runner.address) as gateway:
        await gateway.submit("a", prompt=prompt, prompt_number=7)
        await gateway.finished("a")
        await gateway.submit("b", prompt=(), pages=4, prompt_number=7)
        await gateway.finished("b")
        assert gateway.tokens["a", 1] == gateway.tokens["b", 1] == [token_at(prompt, 7, n) for n in range(8)]
        await gateway.submit("c", prompt=prompt, base="sha256:another", prompt_number=8)
        await gateway.refusal("c")
        await gateway.submit("d", prompt=(), pages=4, prompt_number=8)
        assert (await gateway.finished("d")).finish == common_pb2.FINISH_REASON_LENGTH


async def test_a_prompt_belongs_to_its_stream(folder):
    async with (
        in_process_runner(folder) as runner,
        gateway_to(runner.address) as gateway,
        gateway_to(runner.address, "another") as another,
    ):
        await gateway.submit("a", prompt_number=7)
        await gateway.finished("a")
        await another.submit("b", prompt=(), pages=1, prompt_number=7)
        assert (await another.refusal("b")).failure.code == "declined"


async def test_a_request_that_cannot_be_sent_to_the_engine_fails_alone(folder, monkeypatch):

    def sequence(submit, *prompt, **base):
        made = sequence_of(submit, *prompt, **base)
        return replace(made, parent=lambda: "no process can be sent this") if made.request == "a" else made

    monkeypatch.setattr(generate_service, "sequence_of", sequence)
    async with (
        in_process_runner(folder, engine=SLOW) as runner,
        gateway_to(runner.address) as gateway,
        gateway_to(runner.address, "another") as another,
    ):
        await another.submit("runs", max_tokens=2000)
        await until(lambda: another.tokens.get(("runs", 1)))
        await asyncio.gather(
            another.submit("b", max_tokens=20),
            gateway.submit("a"),
            another.cancel("runs"),
        )
        assert (await gateway.refusal("a")).failure.code == "internal_error"
        assert (await another.finished("runs")).finish == common_pb2.FINISH_REASON_CANCELLED
        await another.finished("b")
        assert another.tokens["b", 1] == tokens_of((1, 2, 3), 7, 20)
        assert len(runner.service.accepted) == 0


async def test_a_request_that_is_lost_on_its_way_to_the_engine_goes_when_it_is_cancelled(folder, monkeypatch):
    post = EngineClient.post
    monkeypatch.setattr(EngineClient, "post", lambda host, one: None if isinstance(one, Add) else post(host, one))
    async with in_process_runner(folder) as runner, gateway_to(runner.address) as gateway:
        await gateway.submit("a")
        await until(lambda: runner.service.accepted.users_of(BASE))
        await gateway.cancel("a")
        assert (await gateway.refusal("a")).failure.code == "declined"
        assert not runner.service.accepted.users_of(BASE)


async def test_a_request_whose_end_the_cancel_meets_gets_no_other_answer(folder):
    async with in_process_runner(folder, engine=SLOW) as runner, gateway_to(runner.address) as gateway:
        await gateway.submit("a", max_tokens=2000)
        await until(lambda: gateway.tokens.get(("a", 1)))
        for _ in range(2):
            runner.service.loaded.generation.cancel("a", 1)
        await gateway.finished("a")
        await gateway.submit("b", max_tokens=2)
        await gateway.finished("b")
        assert not gateway.declined


async def test_a_restarted_runner_is_another_incarnation(folder):
    async with in_process_runner(folder, engine=lambda: FakeEngine(decline_rate=1.0)) as runner:
        first = runner.service.identity.incarnation
        await runner.restart()
        assert runner.service.identity.incarnation != first
        async with gateway_to(runner.address) as gateway:
            await gateway.submit("a")
            assert (await gateway.refusal("a")).failure.code == "declined"


async def test_a_placement_submitted_again_on_another_stream_survives_the_end_of_the_first(folder):
    engines = SlowEngines()
    async with in_process_runner(folder, engine=engines, gateway_grace_seconds=1000) as runner:
        async with gateway_to(runner.address) as first:
            await first.submit("a", max_tokens=60)
            have = await until(lambda: first.tokens.get(("a", 1)))
        async with gateway_to(runner.address) as second:
            await second.submit("a", max_tokens=60, delivered=tuple(have))
            await until(lambda: second.tokens.get(("a", 1)))
            assert [one.request for one in runner.service.accepted] == ["a"]
            engines.hurry()
            await second.finished("a")
            assert have + second.tokens["a", 1] == tokens_of((1, 2, 3), 7, 60)
        assert len(runner.service.accepted) == 0


async def test_a_placement_that_comes_again_before_its_adapter_can_be_cancelled(folder):
    async with in_process_runner(folder, gateway_grace_seconds=PATIENCE_S, adapter_wait_seconds=1000) as runner:
        async with gateway_to(runner.address) as first:
            await first.submit("a", adapter="sha256:none")
            await until(lambda: first.progress("a"))
        async with gateway_to(runner.address) as second:
            await second.submit("a", adapter="sha256:none")
            await until(lambda: second.progress("a"))
            await second.cancel("a")
            assert (await second.finished("a")).finish == common_pb2.FINISH_REASON_CANCELLED
            await until(lambda: not [t for t in asyncio.all_tasks() if t.get_name() == "adapter for a"])
        assert len(runner.service.accepted) == 0


async def test_a_placement_submitted_again_before_its_stream_ended_belongs_to_the_new_stream(folder):
    """The gateway knows that its stream is broken; the runner does not know it yet."""
    engines = SlowEngines()
    async with (
        in_process_runner(folder, engine=engines, gateway_grace_seconds=0.0) as runner,
        gateway_to(runner.address) as second,
    ):
        async with gateway_to(runner.address) as first:
            await first.submit("a", max_tokens=60)
            have = list(await until(lambda: first.tokens.get(("a", 1))))
            await second.submit("a", max_tokens=60, delivered=tuple(have))
            await until(lambda: second.tokens.get(("a", 1)))
        engines.hurry()
        await second.finished("a")
        assert have + second.tokens["a", 1] == tokens_of((1, 2, 3), 7, 60)
        assert len(runner.service.accepted) == 0


async def test_a_request_submitted_by_two_gateways_runs_once(folder):
    async with (
        in_process_runner(folder, engine=SLOW) as runner,
        gateway_to(runner.address) as gateway,
        gateway_to(runner.address, "another") as another,
    ):
        await gateway.submit("a", max_tokens=2000)
        await until(lambda: gateway.tokens.get(("a", 1)))
        await another.submit("a", max_tokens=2000)
        await another.submit("b", max_tokens=2)
        await another.finished("b")
        await gateway.cancel("a")
        await gateway.finished("a")
        have = gateway.tokens["a", 1]
        assert have == tokens_of((1, 2, 3), 7, len(have))
        assert another.tokens.keys() == {("b", 1)}


async def test_a_refusal_of_the_first_submit_does_not_end_the_second(folder):
    """The first one was declined for lack of pages. Pages became free before the second one."""
    address = f"unix:{folder}/s.sock"
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=SLOW) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await until(lambda: scheduler.of("hello"))
        await gateway.submit("a", max_tokens=2000)
        await until(lambda: len(runner.service.accepted) == 1)
        of_a_lost_stream = SequenceRefused(RequestId("a"), 1, -1, Declined("no pages"))
        runner.service.loaded.on_batch(EngineOutputs(refused=[of_a_lost_stream]))
        await gateway.cancel("a")
        await gateway.finished("a")
        assert not gateway.declined
        assert not scheduler.of("declined")


async def test_a_gateway_that_hears_a_token_twice_fails_its_test_at_once(folder):
    """This test's own gateway: a test that waited on would hide what went wrong."""
    async with in_process_runner(folder) as runner:
        with pytest.raises(AssertionError, match="a gap or a repetition"):
            async with gateway_to(runner.address) as gateway:
                await gateway.submit("a")
                await gateway.finished("a")
                await gateway.submit("a")
                await asyncio.sleep(1000)
