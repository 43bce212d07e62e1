"""Keeps the corrections of a version in the database, so that they outlive a restart. Weights hold them as the refit
made them; each answer changes those of its adapter, in each version that estimates."""

import asyncio
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress

from motet.store import Store
from motet.store.length_samples import CHANGE_LEVEL, CORRECTION_LEVEL, PredictorState, load_states, save
from motet_predictor.prompt_model import PromptModel
from motet_predictor.prompt_version import Correction, PromptVersion

CORRECTIONS_AT_ONCE = 100
"""In one transaction, and packed or unpacked in one turn of the event loop, which must also answer Predict in time."""


class ChangedCorrections:
    """What has changed and is not written yet, those of the versions in turn."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[PromptVersion, tuple[str, str]]] = deque()

    def are_due(self, versions: Iterable[PromptVersion]) -> None:
        """Those that have waited longest come first."""
        self._waiting = deque((version, one) for version in versions for one in version.unsaved)

    async def write(self, store: Store, at_most: int) -> int:
        """Write about `at_most` bytes of them. Returns the bytes."""
        written = 0
        while self._waiting and written < at_most:
            version, some = self._take()
            states = [PredictorState(CORRECTION_LEVEL, *one, version.corrections[one].to_bytes()) for one in some]
            try:
                await save(store, version.name, states, [], keep_samples=0)
            except BaseException:  # also cancellation
                version.unsaved |= dict.fromkeys(one for one in some if one in version.corrections)
                raise
            written += sum(len(state.tenant) + len(state.adapter) + len(state.statistics) for state in states)
        return written

    def _take(self) -> tuple[PromptVersion, list[tuple[str, str]]]:
        """Some of one version; not those that were forgotten meanwhile."""
        version, some = self._waiting[0][0], list[tuple[str, str]]()
        while self._waiting and self._waiting[0][0] is version and len(some) < CORRECTIONS_AT_ONCE:
            one = self._waiting.popleft()[1]
            if one in version.unsaved:
                del version.unsaved[one]
                some.append(one)
        return version, some


async def write_changes(store: Store, model: PromptModel) -> None:
    """Note whose lengths have changed, with the time. Before corrections are written or read: those that are older say
    nothing any more."""
    if model.unsaved_changes:
        waiting, model.unsaved_changes = model.unsaved_changes, {}
        try:
            states = [PredictorState(CHANGE_LEVEL, *one, b"") for one in waiting]
            await save(store, model.lengths.version, states, [], keep_samples=0)
        except BaseException:  # also cancellation
            model.unsaved_changes = waiting | model.unsaved_changes
            raise


async def read_corrections(
    store: Store, version: PromptVersion, *, limit: int, restarted: Collection[tuple[str, str]] = ()
) -> None:
    """Where one is damaged, its adapter begins as the refit made it. `restarted`: adapters whose lengths have changed
    since their corrections were written."""
    kept = await load_states(store, version.name, limit=limit, levels=[CORRECTION_LEVEL])
    for start in range(0, len(kept), CORRECTIONS_AT_ONCE):
        for row in kept[start : start + CORRECTIONS_AT_ONCE]:
            if (row.tenant, row.adapter) in restarted:
                version.correction(row.tenant, row.adapter).restart()
                continue
            with suppress(ValueError):
                version.restore(row.tenant, row.adapter, Correction.from_bytes(row.statistics))
        await asyncio.sleep(0)
