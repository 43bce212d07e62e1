"""What `benchmarks.adapters` counts."""

from pathlib import Path

from benchmarks.adapters import Service
from motet_simulator.fake_engine import FakeEngine


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
