"""Keeps the comparisons of versions in the database: otherwise a predictor that restarts often would decide nothing."""

from contextlib import suppress

from motet.store import Store
from motet.store.length_samples import COMPARISON_LEVEL, PredictorState, load_states, save
from motet_predictor.comparison import Comparison
from motet_predictor.versions import Versions


async def write_comparisons(store: Store, versions: Versions) -> int:
    """Write those with the version that serves. Returns the bytes."""
    # All at once: versions may change while one is written.
    against = versions.serving.name
    waiting = {
        version.name: comparison.to_bytes(against)
        for version in versions
        if (comparison := versions.comparison_of(version)) is not None
    }
    for name, data in waiting.items():
        await save(store, name, [PredictorState(COMPARISON_LEVEL, "", "", data)], [], keep_samples=0)
    return sum(map(len, waiting.values()))


async def read_comparisons(store: Store, versions: Versions) -> None:
    """One that is damaged, or was with another version than the one that serves now, begins again."""
    for version in list(versions):
        for row in await load_states(store, version.name, limit=1, levels=[COMPARISON_LEVEL]):
            with suppress(ValueError):
                versions.resume(version, Comparison.from_bytes(row.statistics, versions.serving.name))
