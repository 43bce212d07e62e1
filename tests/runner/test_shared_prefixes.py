"""Answers are the same with and without the prefix cache, and nobody gets keys and values of another."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from motet.domain import BASE, PAGE_TOKENS, Digest, ParkMethod, RequestId
from motet.prefix_hints import prefix_salt, prompt_hints
from motet_runner.engine import Engine
from motet_runner.interface import NewSequence
from motet_runner.metrics import Metrics
from tests.runner.engines import BASE_DIGEST, ask, load, make_engine, run

X, Y = Digest("sha256:x"), Digest("sha256:y")
SYSTEM = tuple(2 + i * 37 % 500 for i in range(100))
"""What all prompts begin with: six full pages and a part of the seventh."""
TURN = 16


def conversation(name: str, turns: int, *, tenant: str = "acme", adapter: Digest = BASE) -> Iterator[NewSequence]:
    """Each prompt is longer than the one before by the same words."""
    said = tuple(3 + (i * 11 + sum(map(ord, name))) % 490 for i in range(turns * TURN))
    for turn in range(1, turns + 1):
        prompt = SYSTEM + said[: turn * TURN]
        yield ask(f"{name}{turn}", prompt=prompt, adapter=adapter, tenant=tenant, max_tokens=12, seed=turn)


def answers(engine: Engine, *conversations: Iterator[NewSequence]) -> dict[str, list[int]]:
    """All conversations at a time, turn by turn."""
    ran = None
    for turn in zip(*conversations, strict=True):
        ran = run(engine, *turn, ran=ran)
    assert ran is not None
    return ran.tokens


def share_of_hits(engine: Engine) -> float:
    report = engine.report()
    return report.prefix_hit_tokens / report.prefix_queried_tokens


@pytest.fixture(scope="module")
def cold(llama: Path, adapters: list[Path]) -> dict[str, list[int]]:
    """The same conversations, with an engine that shares nothing."""
    engine = make_engine(llama, prefix_cache=False)
    load(engine, X, adapters[0])
    tokens = answers(engine, conversation("a", 3), conversation("b", 3), conversation("x", 3, adapter=X))
    assert engine.report().prefix_queried_tokens == 0
    return tokens


@pytest.mark.parametrize(("mib", "pages"), [(4, 341), (0.4, 34)])
def test_answers_from_cached_prefixes_are_the_same(
    llama: Path, adapters: list[Path], cold: dict[str, list[int]], mib: float, pages: int
) -> None:
    """Also where there are so few pages that the cache has to yield some."""
    engine = make_engine(llama, kv_cache_mib=mib, prefill_chunk_tokens=64)
    load(engine, X, adapters[0])
    run(engine, ask("other", prompt=200, tenant="globex"))
    warm = answers(engine, conversation("a", 3), conversation("b", 3), conversation("x", 3, adapter=X))
    assert warm == cold
    assert share_of_hits(engine) > 0.25
    assert engine.report().pages_free == engine.info.pages == pages
    assert (engine.diagnostics.planner.memory.cache.evicted_pages > 0) == (pages == 34)


def test_choices_of_one_call_compute_the_prompt_once(llama: Path, tmp_path: Path) -> None:
    def choices(tenant: str | None) -> list[NewSequence]:
        return [
            ask(
                f"c{choice}", prompt=SYSTEM, seed=9, choice=choice, tenant=tenant, parent="c0" if choice else None,
                temperature=1.0,
            )
            for choice in range(4)
        ]  # fmt: skip

    trace = tmp_path / "trace.jsonl"
    engine = make_engine(llama, step_trace=trace)
    together = run(engine, *choices("acme")).tokens
    assert together == run(make_engine(llama), *choices(None)).tokens
    assert len({tuple(tokens) for tokens in together.values()}) == 4
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    full = len(SYSTEM) // PAGE_TOKENS
    assert sum(line["prefill"] for line in lines) == len(SYSTEM) + 3 * (len(SYSTEM) - full * PAGE_TOKENS)
    assert max(line["shared"] for line in lines) == 3 * full
    assert lines[-1]["pages"] == 0
    assert lines[-1]["cached"] >= full


def test_two_tenants_share_nothing(llama: Path, cold: dict[str, list[int]]) -> None:
    engine = make_engine(llama)
    run(engine, *conversation("a", 1))
    again = run(engine, *conversation("a", 1, tenant="globex"))
    assert share_of_hits(engine) == 0
    assert again.tokens["a1"] == cold["a1"]


def test_two_adapters_share_nothing(llama: Path, adapters: list[Path]) -> None:
    engine = make_engine(llama)
    for digest, folder in ((X, adapters[0]), (Y, adapters[1])):
        load(engine, digest, folder)
    asked = [ask(f"on {adapter}", prompt=SYSTEM, adapter=adapter, tenant="acme") for adapter in (BASE, X, Y)]
    one_by_one = {sequence.request: run(engine, sequence).tokens[sequence.request] for sequence in asked}
    assert share_of_hits(engine) == 0
    assert len({tuple(tokens) for tokens in one_by_one.values()}) == 3


def test_a_salt_that_does_not_name_the_adapter_shares_nothing_with_another_adapter(
    llama: Path, adapters: list[Path]
) -> None:
    engine = make_engine(llama)
    load(engine, X, adapters[0])
    for adapter in (BASE, X):
        sequence = ask(f"on {adapter}", prompt=SYSTEM, adapter=adapter)
        object.__setattr__(sequence, "prefix_salt", b"the same")
        run(engine, sequence)
    assert share_of_hits(engine) == 0


def test_a_new_revision_of_an_adapter_shares_nothing_with_the_old_one(llama: Path, adapters: list[Path]) -> None:
    """Under the same name, and in the same slot."""
    engine = make_engine(llama, max_resident_adapters=1)
    load(engine, X, adapters[0])
    run(engine, ask("old", prompt=SYSTEM, adapter=X, tenant="acme"))
    engine.drop_adapter(X)
    load(engine, Y, adapters[1])
    new = run(engine, ask("new", prompt=SYSTEM, adapter=Y, tenant="acme")).tokens["new"]
    assert share_of_hits(engine) == 0
    fresh = make_engine(llama)
    load(fresh, Y, adapters[1])
    assert new == run(fresh, ask("new", prompt=SYSTEM, adapter=Y)).tokens["new"]


@pytest.mark.parametrize("method", ParkMethod)
def test_a_sequence_that_shares_pages_comes_back_from_parking(
    llama: Path, cold: dict[str, list[int]], method: ParkMethod
) -> None:
    engine = make_engine(llama, host_kv_mib=4)
    engine.set_supervised(True)
    run(engine, *conversation("a", 1))
    ran = run(engine, *conversation("b", 1), steps=4)
    promise = engine.report().sequences[0].promise
    assert engine.park(RequestId("b1"), 1, promise, promise, method)
    run(engine, ran=ran)
    assert engine.resume(RequestId("b1"), 1, promise)
    assert run(engine, ran=ran).tokens["b1"] == cold["b1"]
    assert engine.report().host_bytes_free == engine.info.host_bytes


def test_a_report_charges_shared_pages_to_the_first_who_holds_them(llama: Path) -> None:
    engine = make_engine(llama, preset="paged-promises")
    run(engine, ask("a", prompt=SYSTEM, tenant="acme"), ask("b", prompt=SYSTEM, tenant="acme", parent="a"), steps=3)
    first, second = engine.report().sequences
    assert first.promise == second.promise == 9
    assert (first.charged_pages, second.charged_pages) == (9, 3)


def test_a_report_has_charges_and_hints(llama: Path) -> None:
    engine = make_engine(llama)
    run(engine, ask("a", prompt=SYSTEM, tenant="acme"), ask("b", prompt=SYSTEM, tenant="acme", parent="a"), steps=3)
    report = engine.report()
    first, second = report.sequences
    assert first.charged_pages + second.charged_pages == first.promise + second.promise - 6  # shared pages count once
    assert report.pages_promised == first.promise + second.promise - 6
    assert report.prefix_pages == 6
    salt = prefix_salt(BASE_DIGEST, BASE, "acme")
    assert set(report.cached_prefixes) == set(prompt_hints(salt, SYSTEM))


def test_queries_and_hits_are_metrics_under_our_names_and_those_of_vllm(llama: Path) -> None:
    engine = make_engine(llama)
    registry = CollectorRegistry()
    metrics = Metrics(registry, wall=time.time)
    for name in ("a", "b"):
        run(engine, ask(name, prompt=SYSTEM, tenant="acme"))
        metrics.on_report(engine.report(), model="m")
    assert registry.get_sample_value("motet_prefix_cache_queries_total") == 200
    assert registry.get_sample_value("motet_prefix_cache_hits_total") == 96
    assert registry.get_sample_value("vllm:prefix_cache_queries_total", {"model_name": "m"}) == 200
    assert registry.get_sample_value("vllm:prefix_cache_hits_total", {"model_name": "m"}) == 96
    assert registry.get_sample_value("motet_prefix_cache_pages") == engine.report().prefix_pages


def test_the_first_output_says_how_much_of_its_own_prompt_was_cached(llama: Path, adapters: list[Path]) -> None:
    """No prompt of another tenant, with another salt or with another adapter finds anything."""
    engine = make_engine(llama)
    load(engine, X, adapters[0])
    mine = replace(ask("salted", prompt=SYSTEM, tenant="acme"), prefix_salt=prefix_salt(BASE_DIGEST, BASE, "acme", "s"))
    asked = [
        ask("first", prompt=SYSTEM, tenant="acme"),
        ask("again", prompt=(*SYSTEM, 7), tenant="acme"),
        ask("moved", prompt=SYSTEM, delivered=(9, 9, 9), tenant="acme"),
        ask("other", prompt=SYSTEM, tenant="globex"),
        ask("adapted", prompt=SYSTEM, adapter=X, tenant="acme"),
        mine,
        replace(mine, request=RequestId("salted-again")),
        ask("alone", prompt=SYSTEM),
    ]
    said = {}
    for one in asked:
        said[one.request] = [output.cached_tokens for output in run(engine, one).outputs]
    found = {name: counts[0] for name, counts in said.items()}
    full = len(SYSTEM) // PAGE_TOKENS * PAGE_TOKENS
    nothing = dict.fromkeys(("first", "other", "adapted", "salted", "alone"), 0)
    assert found == nothing | {"again": full, "moved": full, "salted-again": full}
    assert all(later is None for counts in said.values() for later in counts[1:])
