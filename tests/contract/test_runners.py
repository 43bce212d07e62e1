"""What a runner sends to gateways over gRPC: the real service and the gateway tests' fake pass the same tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest

from motet.api.v1 import common_pb2, runner_pb2, runner_pb2_grpc
from motet.digest import asset_digest
from motet.transport.over_grpc import open_channel
from motet_simulator.fake_engine import FakeEngine
from testbed.fake_services import FakeRunner, model_assets
from tests.runner_service.fake_peers import CheckingGateway, gateway_to, until
from tests.support.in_process_runner import in_process_runner, short_folder

STEP_SECONDS = 0.005
NEEDED = {"config.json", "tokenizer.json", "tokenizer_config.json"}


@asynccontextmanager
async def small(folder: Path) -> AsyncIterator[tuple[str, str]]:
    runner = FakeRunner(folder, "r0", model_assets())
    runner.step_seconds = STEP_SECONDS
    await runner.start()
    try:
        yield runner.address, runner.asset_digest
    finally:
        await runner.stop()


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[tuple[str, str]]:
    async with in_process_runner(folder, engine=partial(FakeEngine, step_seconds=STEP_SECONDS)) as runner:
        yield runner.address, asset_digest(folder / "model")


@pytest.fixture(params=[small, real], ids=["small", "real"])
async def runner(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, str]]:
    with short_folder() as folder:
        async with request.param(folder) as one:
            yield one


@pytest.fixture
async def gateway(runner: tuple[str, str]) -> AsyncIterator[CheckingGateway]:
    async with gateway_to(runner[0]) as one:
        yield one


async def test_the_hello_is_answered_with_the_runners_identity(gateway):
    await until(lambda: gateway.welcome)
    assert gateway.welcome.runner.instance == "r0"
    assert gateway.welcome.runner.incarnation


async def test_a_stream_that_begins_without_a_hello_is_refused(runner):
    async with gateway_to(runner[0], hello=False) as gateway:
        await gateway.submit("a")
        await until(lambda: gateway.error)
        assert gateway.error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_every_token_comes_once_in_order_and_the_last_with_the_finish(gateway):
    await gateway.submit("a", max_tokens=40)
    last = await gateway.finished("a")
    assert last.finish == common_pb2.FINISH_REASON_LENGTH
    assert len(gateway.tokens["a", 1]) == 40
    assert gateway.first_index["a", 1] == 0


async def test_a_moved_request_continues_where_it_was(gateway):
    await gateway.submit("whole", max_tokens=20)
    await gateway.finished("whole")
    whole = gateway.tokens["whole", 1]
    await gateway.submit("a", epoch=2, max_tokens=20, delivered=tuple(whole[:12]))
    await gateway.finished("a", 2)
    assert gateway.first_index["a", 2] == 12
    assert gateway.tokens["a", 2] == whole[12:]


async def test_a_cancel_is_answered_with_the_end_and_nothing_comes_after_it(gateway):
    await gateway.submit("a", max_tokens=2000)
    await until(lambda: gateway.tokens.get(("a", 1)))
    await gateway.cancel("a")
    last = await gateway.finished("a")
    assert (last.finish, list(last.tokens)) == (common_pb2.FINISH_REASON_CANCELLED, [])
    count = len(gateway.tokens["a", 1])
    assert last.index == count
    await gateway.submit("b")
    await gateway.finished("b")
    assert len(gateway.tokens["a", 1]) == count


async def test_a_cancel_of_an_unknown_request_or_another_epoch_does_nothing(gateway):
    await gateway.submit("a", epoch=2, max_tokens=20)
    await gateway.cancel("a", 1)
    await gateway.cancel("b")
    assert (await gateway.finished("a", 2)).finish == common_pb2.FINISH_REASON_LENGTH
    assert gateway.finish.keys() == {("a", 2)}


async def test_a_higher_epoch_replaces_the_older_one_which_ends(gateway):
    await gateway.submit("a", max_tokens=2000)
    have = await until(lambda: gateway.tokens.get(("a", 1)))
    await gateway.submit("a", epoch=2, max_tokens=10, delivered=tuple(have[:1]))
    await gateway.finished("a", 2)
    assert len(gateway.tokens["a", 2]) == 9
    assert (await gateway.finished("a", 1)).finish == common_pb2.FINISH_REASON_CANCELLED


async def test_a_lower_epoch_is_declined_even_after_the_end(gateway):
    await gateway.submit("a", epoch=3)
    await gateway.finished("a", 3)
    await gateway.submit("a", epoch=2, term=1)
    declined = await gateway.refusal("a", 2)
    assert (declined.failure.code, declined.term) == ("declined", 1)


async def test_a_request_for_another_base_model_is_declined(gateway):
    await gateway.submit("a", base="sha256:" + "0" * 64)
    declined = await gateway.refusal("a")
    assert declined.failure.code == "declined"
    assert declined.failure.retry_after_seconds > 0, "the scheduler places it elsewhere"
    assert "base model" in declined.failure.message


async def test_a_submit_has_exactly_one_choice(gateway):
    await gateway.submit("a", choices=2)
    assert (await gateway.refusal("a")).failure.code == "invalid_value"


async def test_a_request_that_is_submitted_twice_on_one_stream_runs_once(gateway):
    for _ in range(2):
        await gateway.submit("a", max_tokens=40)
    await gateway.finished("a")
    await gateway.submit("b")
    await gateway.finished("b")
    assert len(gateway.tokens["a", 1]) == 40


async def test_each_gateway_gets_only_its_own_tokens(runner):
    async with gateway_to(runner[0], "g0") as one, gateway_to(runner[0], "g1") as two:
        await one.submit("a")
        await two.submit("b")
        await one.finished("a")
        await two.finished("b")
        assert (set(one.tokens), set(two.tokens)) == ({("a", 1)}, {("b", 1)})


async def test_requests_of_a_lost_stream_end_and_their_gateway_may_submit_them_again(runner):
    async with gateway_to(runner[0], "g0") as one:
        await one.submit("a", max_tokens=300)
        have = tuple(await until(lambda: one.tokens.get(("a", 1))))
    async with gateway_to(runner[0], "g0") as two:
        await two.submit("a", epoch=2, max_tokens=len(have) + 5, delivered=have)
        await two.finished("a", 2)
        assert len(two.tokens["a", 2]) == 5


async def read_assets(address: str, digest: str) -> dict[str, bytes]:
    assets: dict[str, bytes] = {}
    whole: set[str] = set()
    async with open_channel(address) as channel:
        async for chunk in runner_pb2_grpc.RunnerStub(channel).Assets(runner_pb2.AssetsRequest(digest=digest)):
            assert chunk.name not in whole, "nothing of a file comes after its last chunk"
            assets[chunk.name] = assets.get(chunk.name, b"") + chunk.data
            if chunk.last:
                whole.add(chunk.name)
    assert whole == assets.keys()
    return assets


async def test_assets_come_whole_under_their_digest(runner):
    assets = await read_assets(*runner)
    assert assets.keys() >= NEEDED
    assert all(assets[name] for name in NEEDED)


async def test_assets_of_another_digest_are_not_there(runner):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read_assets(runner[0], "sha256:" + "0" * 64)
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
