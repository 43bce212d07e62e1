"""The benchmark of the prefix cache measures hits and misses, and counts no time twice."""

from pathlib import Path

import pytest

from benchmarks import prefix
from benchmarks.prefix import compare_first_tokens, idle_share
from tests.runner.engines import make_engine
from tests.runner.random_models import llama as config_of_llama
from tests.runner.random_models import save_base

SHARED = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base("llama", tmp_path_factory.mktemp("llama") / "base", config=config_of_llama())


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "VOCABULARY", 500)


async def test_misses_are_compared_with_hits(model: Path) -> None:
    engine = make_engine(model)
    pairs = await compare_first_tokens(engine, SHARED, 2)
    assert len(pairs.a) == 2
    assert engine.report().prefix_hit_tokens == (2 + pairs.discarded) * SHARED


async def test_hits_that_find_nothing_are_no_result(model: Path) -> None:
    with pytest.raises(AssertionError, match="found 0 tokens instead of 64"):
        await compare_first_tokens(make_engine(model, prefix_cache=False), SHARED, 1)


def test_the_share_of_the_cache_is_taken_where_nothing_is_shared(model: Path) -> None:
    engine = make_engine(model)
    assert 0 < idle_share(engine, 4, 20) < 1
    assert engine.report().prefix_queried_tokens > 0
    with pytest.raises(AssertionError, match="shared pages"):
        idle_share(engine, 4, 20)  # the same prompts again
