"""What `benchmarks.adapters` counts."""

from argparse import Namespace
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.adapter_proofs import measure_proofs
from benchmarks.adapter_stack import TENANTS, HostileAdapters, owner_of
from benchmarks.adapter_traffic import Traffic, p95_of_all
from benchmarks.adapters import Service
from benchmarks.engine_run import Ask, Run
from benchmarks.many_adapters import RANKS, WEIGHTS, ManyAdapters
from benchmarks.random_llama import LlamaShape, random_adapter, random_llama
from motet.errors import AdapterIncompatible
from motet_runner.adapters.certification import certify
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig
from motet_simulator.fake_engine import FakeEngine
from testbed import proof_missed
from testbed.proof_missed import ADAPTERS, READING
from testbed.reading_mutants import Misread


async def test_the_adapters_are_different_ones_and_none_of_them_is_in_a_later_report(tmp_path: Path) -> None:
    """Mutation: reports list all resident adapters."""
    service, engine = Service(tmp_path, capacity=20), FakeEngine()
    await service.register(range(2))
    few = service.sent_in_a_second(engine.report())
    await service.register(range(2, 12))
    layouts = dict(service.layouts())
    assert len(layouts) == 12
    assert all(layout.is_stored() for layout in layouts.values())
    assert few == service.sent_in_a_second(engine.report())
    service.registry.close()


SMALL = LlamaShape(vocabulary=128, width=64, feed_forward=172, layers=1, heads=1, kv_heads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(SMALL, tmp_path_factory.mktemp("model"))


def test_each_of_many_adapters_has_the_layout_that_its_own_check_gives(tmp_path: Path, model: Path) -> None:
    """Mutation: the layout of another rank is taken."""
    engine = Engine(EngineConfig(model=model, device="cpu", kernels="torch", kv_cache_mib=8))
    many = ManyAdapters(SMALL, tmp_path, 8)
    layouts = many.layouts(engine)
    for folder, layout in zip(many.folders, layouts, strict=True):
        own = certify(folder, engine.info).layout
        assert (layout.stamp, layout.rank, layout.linears) == (own.stamp, own.rank, own.linears)
        assert (folder / layout.slab).stat().st_size
    assert [layout.rank for layout in layouts] == [*RANKS, *RANKS]
    assert len({(folder / WEIGHTS).read_bytes() for folder in many.folders}) == 8


async def test_traffic_loads_what_is_not_on_the_device_and_nothing_else(tmp_path: Path, model: Path) -> None:
    """Mutation: the engine learns of all adapters at the beginning. It loads them before they are asked for."""
    given = Namespace(prompt=4, output=2, vocabulary=SMALL.vocabulary, neighbour_tokens=20)
    traffic = Traffic(model, ManyAdapters(SMALL, tmp_path, 12), 4, given)
    for cold in (True, False):
        first = await traffic.first_tokens(3, cold=cold)()
        assert len(first) == 3
        assert min(first) > 0
    assert p95_of_all([[3.0] * 9, [1.0] * 9 + [2.0], [1.0] * 181]) == 2.0
    one, another = map(traffic.digests.index, traffic.cold(2))
    asks, served = traffic.serve([one, another, one])
    assert served.loads == 2
    assert [len(tokens) for tokens in served.tokens] == [2, 2, 2]
    with pytest.raises(RuntimeError, match="2 adapters were loaded, and not 0"):
        traffic.check_loads([served], 0)
    assert len(asks) == 3


def test_at_most_as_many_requests_run_as_are_to(tmp_path: Path, model: Path) -> None:
    given = Namespace(prompt=4, output=4, vocabulary=SMALL.vocabulary)
    run = Run(Engine(EngineConfig(model=model, device="cpu", kernels="torch", kv_cache_mib=8)), given)
    served = run.serve([Ask((2, 3), 4) for _ in range(6)], at_once=2)
    begins, ends = [times[0] for times in served.times], [times[-1] for times in served.times]
    assert all(begins[later] > ends[later - 2] for later in range(2, 6))


def test_hostile_adapters_are_refused_for_what_they_are_and_each_is_another_one(tmp_path: Path, model: Path) -> None:
    engine = Engine(EngineConfig(model=model, device="cpu", kernels="torch", kv_cache_mib=8))
    honest = random_adapter(SMALL, tmp_path / "honest", rank=4, seed=0)
    hostile = list(islice(HostileAdapters(tmp_path / "hostile", honest, header_bytes=1 << 16), 4))
    reasons = []
    for folder in hostile:
        with pytest.raises(AdapterIncompatible) as refused:
            certify(folder, engine.info)
        reasons.append(refused.value.message)
    assert "belong to no linear" in reasons[0]
    assert "takes too long" in reasons[1]
    assert len({b"".join(path.read_bytes() for path in sorted(folder.iterdir())) for folder in hostile}) == 4


def test_the_long_header_is_one_that_is_parsed_to_its_end(tmp_path: Path, model: Path) -> None:
    """Mutation: a header of 15 MiB, which is refused without parsing."""
    engine = Engine(EngineConfig(model=model, device="cpu", kernels="torch", kv_cache_mib=8))
    honest = random_adapter(SMALL, tmp_path / "honest", rank=4, seed=0)
    with pytest.raises(AdapterIncompatible, match=r"(\d+) of \1 tensors belong to no linear"):
        certify(next(iter(HostileAdapters(tmp_path / "hostile", honest))), engine.info)


def test_of_the_second_half_one_tenant_has_most_and_each_other_one_some() -> None:
    alike = Counter(owner_of(number, 2000) for number in range(1000))
    assert set(alike.values()) == {1000 // TENANTS}
    pile = Counter(owner_of(number, 2000) for number in range(1000, 2000))
    assert pile.pop(0) == 900
    assert len(pile) == TENANTS - 1
    assert set(pile.values()) == {11, 12}


def test_the_proofs_of_the_benchmark_count_a_mutant_that_nothing_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: what comes in place of a refusal is not looked at."""
    swapped, harmless = "tensors of q and o swapped", Misread(lambda _: None, "plain")
    monkeypatch.setattr(proof_missed, "MUTANTS", {swapped: READING[swapped], "none at all": harmless})
    monkeypatch.setattr(proof_missed, "REFUSED_BY", {swapped: "ReadingsDiffer", "none at all": "ReadingsDiffer"})
    monkeypatch.setattr(proof_missed, "ADAPTERS", {name: ADAPTERS[name] for name in ("plain", "wide", "rich")})
    (result,) = measure_proofs(tmp_path)
    assert (result.name, result.value, result.holds) == ("proof_missed", 1, False)
