"""A list of many models."""

import asyncio
from typing import Any

import pytest

from motet_gateway.routes import models
from testbed.fake_services import FakeServices
from tests.gateway.conftest import serve


async def test_others_are_answered_while_many_models_are_listed(
    cluster: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand cards take a tenth of a second of the event loop."""
    names = [f"a{number:04}" for number in range(3 * models.LISTED_AT_ONCE)]
    for name in names:
        cluster.add_adapter(name)
    made, model_card, together = 0, models.model_card, list[int]()

    def counted(*card: Any) -> dict[str, Any]:
        nonlocal made
        made += 1
        return model_card(*card)

    async def another() -> None:
        while True:
            before = made
            await asyncio.sleep(0)
            together.append(made - before)

    async with serve(cluster) as served:
        monkeypatch.setattr(models, "model_card", counted)
        other = asyncio.create_task(another())
        answer = await served.http.get("/v1/models")
        other.cancel()
    listed = [card["id"] for card in answer.json()["data"]]
    assert listed == sorted(listed)
    assert {*names} < {*listed}
    assert made == len(listed)
    assert max(together) == models.LISTED_AT_ONCE
