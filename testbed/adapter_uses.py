"""Uses of adapters by Zipf's law, and how many of them find their adapter on the device, or in the disk cache."""

from pathlib import Path
from random import Random

from motet.domain import Digest, RequestId
from motet_runner.adapters.layout import AdapterLayout, FileStamp
from motet_runner.adapters.policy.eviction import CacheLimits, Eviction
from motet_runner.adapters.policy.values import CacheContents, Cached
from motet_runner.interface import NewSequence, Sampling
from motet_runner.plan import LoadArrived, Planner, StepResult, preset_named

PLACES, ADAPTERS, USES = 64, 2000, 20_000


def uses_of(exponent: float, seed: int = 7) -> list[Digest]:
    weights = [1 / rank**exponent for rank in range(1, ADAPTERS + 1)]
    return [Digest(f"sha256:{one:064x}") for one in Random(seed).choices(range(ADAPTERS), weights, k=USES)]


def hits_on_device(uses: list[Digest]) -> int:
    """With the planner of an engine, and one request for each use."""
    planner = Planner(
        page_tokens=16,
        pages=2 * PLACES,
        preset=preset_named("paged-chunk"),
        places=1,
        chunk_tokens=16,
        max_length=16,
        vocabulary=2,
        max_adapters=PLACES,
        pages_of_rank=lambda rank: rank,
        prefix_cache=False,
    )
    layout = AdapterLayout.of(Path("nowhere"), FileStamp(0, 0, 0), rank=1, linears=())
    found = 0
    for number, one in enumerate(uses):
        request = RequestId(str(number))
        if planner.adapters.is_here(one):
            found += 1
        else:
            planner.commands.load_adapter(one, layout)
        planner.commands.add(
            NewSequence(request=request, epoch=1, prompt=(0,), adapter=one, promise=1, sampling=Sampling(max_tokens=1))
        )
        _run(planner)
    return found


def _run(planner: Planner) -> None:
    """Until the request has its token"""
    while not planner.take_outputs()[0]:
        plan = planner.plan()
        assert plan is not None
        arrived = tuple(LoadArrived(number, seconds=0.0) for number in plan.loading)
        planner.collect(StepResult(number=plan.number, sampled=(0,) * len(plan.prefills), arrived=arrived))


def hits_on_disk(uses: list[Digest]) -> int:
    """With the eviction of the disk cache"""
    eviction = Eviction(CacheLimits(PLACES))
    cached: dict[Digest, None] = {}
    found = 0
    for one in uses:
        eviction.frequency.used(one)
        found += one in cached
        cached.pop(one, None)
        cached[one] = None
        if eviction.answered(one):
            eviction.listed(CacheContents(tuple(map(Cached, cached))), lambda _: False, lambda _: False, {})
            while (gone := eviction.next(lambda _: False)) is not None:
                del cached[gone]
                eviction.removed()
            eviction.ended()
    return found


def best_hits(uses: list[Digest]) -> int:
    """Belady's: whatever is used last, or never again, leaves."""
    later: dict[Digest, list[int]] = {}
    for at in range(len(uses) - 1, -1, -1):
        later.setdefault(uses[at], []).append(at)
    cached: dict[Digest, int] = {}
    found = 0
    for one in uses:
        later[one].pop()
        found += one in cached
        cached[one] = later[one][-1] if later[one] else len(uses)
        if len(cached) > PLACES:
            del cached[max(cached, key=lambda digest: cached[digest])]
    return found
