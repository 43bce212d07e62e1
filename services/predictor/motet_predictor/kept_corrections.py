"""Keeps the corrections of a version in the database, so that they outlive a restart. Weights hold them as the refit
made them; each answer changes those of its adapter, in each version that estimates."""

import asyncio
from collections.abc import Collection
from contextlib import suppress

from motet.store import Store
from motet.store.length_samples import CORRECTION_LEVEL, PredictorState, load_states, save
from motet_predictor.prompt_version import Correction, PromptVersion

CORRECTIONS_AT_ONCE = 100
"""In one transaction, and packed or unpacked in one turn of the event loop, which must also answer Predict in time."""


async def write_corrections(store: Store, version: PromptVersion) -> None:
    """Write those that have changed since the last time."""
    waiting = list(version.unsaved)
    for start in range(0, len(waiting), CORRECTIONS_AT_ONCE):
        # Others may have been forgotten while the batch before was written.
        some = [one for one in waiting[start : start + CORRECTIONS_AT_ONCE] if one in version.corrections]
        for one in some:
            version.unsaved.pop(one, None)
        states = [PredictorState(CORRECTION_LEVEL, *one, version.corrections[one].to_bytes()) for one in some]
        try:
            await save(store, version.name, states, [], keep_samples=0)
        except BaseException:  # also cancellation
            version.unsaved |= dict.fromkeys(one for one in some if one in version.corrections)
            raise


async def read_corrections(
    store: Store, version: PromptVersion, *, limit: int, restarted: Collection[tuple[str, str]] = ()
) -> None:
    """Where one is damaged, its adapter begins as the refit made it. `restarted`: adapters whose lengths have changed,
    perhaps after their corrections were written."""
    kept = await load_states(store, version.name, limit=limit, levels=[CORRECTION_LEVEL])
    for start in range(0, len(kept), CORRECTIONS_AT_ONCE):
        for row in kept[start : start + CORRECTIONS_AT_ONCE]:
            if (row.tenant, row.adapter) not in restarted:
                with suppress(ValueError):
                    version.restore(row.tenant, row.adapter, Correction.from_bytes(row.statistics))
        await asyncio.sleep(0)
