"""The figures of placement, over less time."""

from argparse import Namespace

from benchmarks.cluster import ADAPTERS, HALF, Measured, fcfs, hours, load, on_cpus
from benchmarks.placements import Fullest, Production, Random, ShortestQueue
from motet_simulator.workloads.popularity import Law, choices

SHORT = Namespace(minutes=0.5, requests=48, data=None)


def test_production_keeps_gpus_idle_that_the_shortest_queue_uses():
    figures = {one.name: one.value for one in hours(SHORT)}
    assert figures.keys() == {"busy_hours_ratio", "gap_p99_ratio", "ttft_p99_ratio"}
    assert figures["busy_hours_ratio"] > 2


def test_each_way_serves_all_and_production_loads_the_fewest_adapters():
    requests = load(HALF, 20.0, None, choices(Law.ZIPF, ADAPTERS, 1))
    ways = Production, Fullest, ShortestQueue, Random
    measured = {way: Measured.of(requests, way(), 20.0, ADAPTERS) for way in ways}
    assert {one.outcome.requests for one in measured.values()} == {len(requests)}
    assert min(ways, key=lambda way: measured[way].cold) is Production
    assert measured[Production].cold < measured[Fullest].cold
    assert max(measured[Production].hours, measured[Fullest].hours) < 0.75 * measured[Random].hours


def test_requests_of_runners_on_cpus_move_together() -> None:
    found = on_cpus(None, rate=1.5)
    assert found.value < 0.98
    assert found.name == "consolidation_hours_cpus"


def test_batches_of_mixed_adapters_serve_more_than_batches_of_one():
    figures = {one.name: one.value for one in fcfs(SHORT)}
    assert figures["vs_fcfs_distinct"] > 10
    assert 0.95 <= figures["vs_fcfs_identical"] <= 1.05
