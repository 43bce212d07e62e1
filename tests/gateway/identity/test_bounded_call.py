"""A call to a store ends in time, also if the store's driver does not."""

import asyncio
import contextlib

import pytest

from motet.errors import StoreUnavailable
from motet_gateway.identity import bounded_call
from motet_gateway.identity.bounded_call import BoundedCall
from tests.common.waiting import PATIENCE_S


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> BoundedCall:
    monkeypatch.setattr(bounded_call, "CLEAN_UP_SECONDS", 0.05)
    return BoundedCall(0.05)


async def answer() -> str:
    return "an answer"


async def hang() -> str:
    await asyncio.Event().wait()
    return "never"


async def hang_and_hang_while_it_is_stopped() -> str:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.Event().wait()
    return "never"


async def give_up() -> str:
    raise asyncio.CancelledError


async def break_down() -> str:
    raise ValueError("broken")


async def test_a_bounded_call_passes_on_results_and_errors(asked: BoundedCall) -> None:
    assert await asked.ask(answer) == "an answer"
    with pytest.raises(ValueError, match="broken"):
        await asked.ask(break_down)


async def test_a_driver_that_cancels_itself_ends_no_other_task(asked: BoundedCall) -> None:
    with pytest.raises(StoreUnavailable, match="cancelled the call"):
        await asked.ask(give_up)
    assert await asked.ask(answer) == "an answer"


async def test_a_hanging_call_is_abandoned_after_a_while(asked: BoundedCall) -> None:
    with pytest.raises(StoreUnavailable, match=r"no answer within 0\.05 seconds"):
        await asked.ask(hang)
    assert await asked.ask(answer) == "an answer"


async def test_a_hanging_clean_up_is_abandoned_and_stopped_at_the_next_call(asked: BoundedCall) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(StoreUnavailable, match="no answer"):
            await asked.ask(hang_and_hang_while_it_is_stopped)
        assert await asked.ask(answer) == "an answer"


async def test_while_a_call_cannot_be_stopped_no_other_call_begins(asked: BoundedCall) -> None:
    ends = asyncio.Event()

    async def hang_on() -> None:
        while not ends.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await ends.wait()

    for why in ("no answer", "still hangs"):
        with pytest.raises(StoreUnavailable, match=why):
            await asked.ask(hang_on)
    ends.set()
    await asyncio.sleep(0)
    assert await asked.ask(answer) == "an answer"


async def test_the_caller_can_be_cancelled(asked: BoundedCall) -> None:
    asking = asyncio.create_task(BoundedCall(60).ask(hang))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
