"""Keeps the model's statistics in the database: loads them once, writes changes in batches, and survives outages."""

import asyncio
from contextlib import suppress

import structlog

from motet.errors import StoreRefused, StoreUnavailable
from motet.room_per_tenant import RoomPerTenant
from motet.store import Store
from motet.store import length_samples as table
from motet_predictor.learned_requests import MAX_LEARNED, LearnedRequests
from motet_predictor.length_model import LengthModel, Scope
from motet_predictor.metrics import Metrics
from motet_predictor.sample_features import MAX_SAMPLE_BYTES

log = structlog.get_logger(__name__)

ROWS_PER_WRITE = 25
"""Scopes that are packed or unpacked without a pause, and the same number of samples is written with them: about 1 ms
of the event loop, which must also answer Predict in time."""

_Row = table.PredictorState | table.LengthSample


class Persistence:
    """Changes wait in memory until `flush` writes them. Nothing is written before the existing rows are loaded."""

    def __init__(
        self,
        store: Store,
        model: LengthModel,
        metrics: Metrics,
        learned: LearnedRequests,
        *,
        load_scopes: int,
        queued_samples: int,
        keep_samples: int,
    ) -> None:
        self._store = store
        self._model = model
        self._metrics = metrics
        self._learned = learned
        self._load_scopes = load_scopes
        self._keep_samples = keep_samples
        self._samples = RoomPerTenant[table.LengthSample](queued_samples)
        self._may_write = 0
        self._loaded = False
        self._recalled = asyncio.Event()
        self._active = False
        self._up = True

    async def recalled(self) -> None:
        """Returns when it is known what was learned before, or that the database cannot say it now."""
        await self._recalled.wait()

    def add(self, sample: table.LengthSample) -> None:
        if not self._samples.add(sample):
            self._metrics.samples_dropped.inc()

    async def flush(self, at_most: int | None = None) -> bool:
        """Write all changes, or about `at_most` bytes of them: what is more is taken off the next time. False while the
        database can't be reached, which is logged once."""
        try:
            if not self._active:
                await table.activate_version(self._store, self._model.version)
                self._active = True
            if not self._loaded:
                await self._load()
            await self._save(at_most)
        except StoreUnavailable as error:
            if self._up:
                log.warning("database_down", reason=error.message, hint="The predictor keeps answering from memory.")
            self._up = self._active = False  # it may be another, empty one when it returns
            self._recalled.set()
        else:
            if not self._up:
                log.info("database_up", waiting_samples=len(self._samples))
            self._up = True
        self._metrics.store_up.set(self._up)
        return self._up

    async def forget(self) -> None:
        """Delete what the model has forgotten. Twice as many as it has stay: rows of one write have one time, so their
        order is not quite that of the model. During an outage it waits for the next time."""
        with suppress(StoreUnavailable):
            await table.forget_states(self._store, keep=2 * self._load_scopes)

    async def _load(self) -> None:
        states = await table.load_states(self._store, self._model.version, limit=self._load_scopes)
        # Before any is restored: if this fails, all of it comes again, and would be merged with itself.
        learned = await table.newest_requests(self._store, MAX_LEARNED)
        kept = [(Scope(state.level, state.tenant, state.adapter), state.statistics) for state in reversed(states)]
        for start in range(0, len(kept), ROWS_PER_WRITE):
            for scope, why in self._model.restore(kept[start : start + ROWS_PER_WRITE]):
                log.warning("statistics_unreadable", scope=scope, reason=why, hint="They are learned again.")
            await asyncio.sleep(0)
        self._learned.recall(learned)
        self._loaded = True
        self._recalled.set()
        log.info("statistics_loaded", version=self._model.version, scopes=len(states))

    async def _save(self, at_most: int | None) -> None:
        if at_most is not None:
            self._may_write = min(self._may_write, 0) + at_most
        for _ in range(0, max(self._model.unsaved_count, len(self._samples)), ROWS_PER_WRITE):
            if at_most is not None and self._may_write <= 0:
                break
            self._may_write -= await self._save_some()

    async def _save_some(self) -> int:
        """Write one batch, and return its bytes. If the database refuses a row, split the batch in
        halves until that row is alone."""
        changes = self._model.changes(ROWS_PER_WRITE)
        samples = self._samples.take(ROWS_PER_WRITE)
        states = [table.PredictorState(scope.level, scope.tenant, scope.adapter, data) for scope, data in changes]
        waiting: list[list[_Row]] = [[*states, *samples]]
        try:
            while waiting:
                rows = waiting[-1]
                try:
                    await self._write(rows)
                except StoreRefused as error:
                    half = len(rows) // 2
                    if half:
                        waiting[-1:] = [rows[half:], rows[:half]]
                        continue
                    self._reject_row(rows[0], error)
                waiting.pop()
        except BaseException:  # also cancellation: unwritten rows must still be written at stop
            self._requeue([row for rows in reversed(waiting) for row in rows])
            raise
        return sum(len(data) for _, data in changes) + len(samples) * MAX_SAMPLE_BYTES

    async def _write(self, rows: list[_Row]) -> None:
        states = [row for row in rows if isinstance(row, table.PredictorState)]
        samples = [row for row in rows if isinstance(row, table.LengthSample)]
        await table.save(self._store, self._model.version, states, samples, keep_samples=self._keep_samples)

    def _requeue(self, rows: list[_Row]) -> None:
        self._model.mark_unsaved(
            Scope(row.level, row.tenant, row.adapter) for row in rows if isinstance(row, table.PredictorState)
        )
        samples = [row for row in rows if isinstance(row, table.LengthSample)]
        self._metrics.samples_dropped.inc(self._samples.put_back(samples))

    def _reject_row(self, row: _Row, error: StoreRefused) -> None:
        self._metrics.rows_refused.labels(table.name_of(row)).inc()
        log.error(
            "row_rejected",
            table=table.name_of(row),
            tenant=row.tenant,
            adapter=row.adapter,
            reason=error.message,
            hint="The database never accepts this row. It is dropped.",
        )
