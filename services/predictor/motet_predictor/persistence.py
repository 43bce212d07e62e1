"""Keeps the model's statistics in the database: loads them once, writes changes in batches, and survives outages."""

import asyncio
from collections import deque

import structlog

from motet.errors import StoreRefused, StoreUnavailable
from motet.store import Store
from motet.store import length_samples as table
from motet_predictor.length_model import LengthModel, Scope
from motet_predictor.metrics import Metrics

log = structlog.get_logger(__name__)

ROWS_PER_WRITE = 100
"""Scopes that are packed or unpacked without a pause: about 5 ms of the event loop, which must also answer Predict in
time. The same number of samples is written with them."""

_Row = table.PredictorState | table.LengthSample


class Persistence:
    """Changes wait in memory until `flush` writes them. Nothing is written before the existing rows are loaded."""

    def __init__(
        self,
        store: Store,
        model: LengthModel,
        metrics: Metrics,
        *,
        load_scopes: int,
        queued_samples: int,
        keep_samples: int,
    ) -> None:
        self._store = store
        self._model = model
        self._metrics = metrics
        self._load_scopes = load_scopes
        self._keep_samples = keep_samples
        self._samples: deque[table.LengthSample] = deque(maxlen=queued_samples)
        self._loaded = False
        self._active = False
        self._up = True

    def add(self, sample: table.LengthSample) -> None:
        if len(self._samples) == self._samples.maxlen:
            self._metrics.samples_dropped.inc()
        self._samples.append(sample)

    async def flush(self) -> bool:
        """Write all changes. False while the database can't be reached, which is logged once."""
        try:
            if not self._active:
                await table.activate_version(self._store, self._model.version)
                self._active = True
            if not self._loaded:
                await self._load()
            await self._save()
        except StoreUnavailable as error:
            if self._up:
                log.warning("database_down", reason=error.message, hint="The predictor keeps answering from memory.")
            self._up = self._active = False  # it may be another, empty one when it returns
        else:
            if not self._up:
                log.info("database_up", waiting_samples=len(self._samples))
            self._up = True
        self._metrics.store_up.set(self._up)
        return self._up

    async def _load(self) -> None:
        states = await table.load_states(self._store, self._model.version, limit=self._load_scopes)
        kept = [(Scope(state.level, state.tenant, state.adapter), state.statistics) for state in states]
        for start in range(0, len(kept), ROWS_PER_WRITE):
            for scope, why in self._model.restore(kept[start : start + ROWS_PER_WRITE]):
                log.warning("statistics_unreadable", scope=scope, reason=why, hint="They are learned again.")
            await asyncio.sleep(0)
        self._loaded = True
        log.info("statistics_loaded", version=self._model.version, scopes=len(states))

    async def _save(self) -> None:
        for _ in range(0, max(self._model.unsaved_count, len(self._samples)), ROWS_PER_WRITE):
            await self._save_some()

    async def _save_some(self) -> None:
        """Write one batch. If the database refuses a row, split the batch in halves until that row is alone."""
        changes = self._model.changes(ROWS_PER_WRITE)
        samples = [self._samples.popleft() for _ in range(min(ROWS_PER_WRITE, len(self._samples)))]
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

    async def _write(self, rows: list[_Row]) -> None:
        states = [row for row in rows if isinstance(row, table.PredictorState)]
        samples = [row for row in rows if isinstance(row, table.LengthSample)]
        await table.save(self._store, self._model.version, states, samples, keep_samples=self._keep_samples)

    def _requeue(self, rows: list[_Row]) -> None:
        self._model.mark_unsaved(
            Scope(row.level, row.tenant, row.adapter) for row in rows if isinstance(row, table.PredictorState)
        )
        since = list(self._samples)
        self._samples.clear()
        for sample in [row for row in rows if isinstance(row, table.LengthSample)] + since:
            self.add(sample)

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
