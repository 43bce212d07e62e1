"""What is gone and what only seems to be, against an API server that cannot always say."""

import asyncio
from typing import Any

import pytest

import motet_operator.cluster.vanished as under_test
from motet.clock import FakeClock
from motet.kube import ApiError, Unreachable
from motet_operator.cluster.api import ApiRefused
from motet_operator.cluster.kinds import ADAPTERS, Kind, Object
from motet_operator.cluster.vanished import VanishedObjects
from tests.operator.cluster.objects import adapter, pool, snapshot


class Discovery:
    def __init__(self) -> None:
        self.answer: frozenset[str] | ApiError | None = frozenset({"create"})
        """None: it says nothing."""

    async def verbs(self, kind: Kind) -> frozenset[str]:
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, ApiError):
            raise self.answer
        assert self.answer is not None
        return self.answer


class Setup:
    def __init__(self) -> None:
        self.api, self.clock = Discovery(), FakeClock()
        api: Any = self.api
        self.continuity = VanishedObjects(api, 600, self.clock)

    async def serves(self, *objects: Object) -> list[str]:
        return sorted(name for _, name in (await self.continuity.complete(snapshot(*objects)))[ADAPTERS])


FAILURES = [Unreachable("away"), ApiRefused("discover", ADAPTERS, "", status=503, message="later"), None]


@pytest.mark.parametrize("failure", FAILURES, ids=["unreachable", "unavailable", "silent"])
async def test_a_deleted_object_is_kept_until_the_api_server_explains_the_deletion(
    failure: ApiError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "ANSWER_SECONDS", 0.01)
    setup = Setup()
    await setup.serves(pool(), adapter(), adapter("other"))
    setup.api.answer = failure
    assert await setup.serves(pool(), adapter("other")) == ["legal", "other"]
    assert setup.continuity.due() == 1.0  # it asks again
    assert await setup.serves(pool()) == ["legal", "other"]
    setup.api.answer = frozenset({"create"})
    assert await setup.serves(pool()) == []
    assert setup.continuity.due() is None


async def test_an_object_deleted_with_its_definition_is_kept_after_a_late_answer() -> None:
    setup = Setup()
    await setup.serves(pool(), adapter())
    setup.api.answer = Unreachable("away")
    await setup.serves(pool())
    setup.api.answer = frozenset()
    assert await setup.serves(pool()) == ["legal"]
    setup.api.answer = frozenset({"create"})  # the definition is back, and its objects are not
    assert await setup.serves(pool()) == ["legal"]
    setup.clock.advance(601)
    assert await setup.serves(pool()) == []


async def test_an_unexplained_deletion_counts_after_a_time_limit() -> None:
    setup = Setup()
    await setup.serves(pool(), adapter())
    setup.api.answer = Unreachable("away")
    assert await setup.serves(pool()) == ["legal"]
    setup.clock.advance(601)
    assert await setup.serves(pool()) == []
