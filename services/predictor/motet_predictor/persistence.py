"""Between the model in memory and the database: loads once, writes in batches, and outlives the database's absence."""

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
"""Scopes that are packed or unpacked before others have their turn: some 5 ms of the event loop, which also answers
Predict within its budget. So many samples go with them."""

_Row = table.PredictorState | table.LengthSample


class Persistence:
    """Everything waits in memory until `flush` has written it. Nothing is written before what is there was loaded."""

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
        """Write what has changed. False, with a word in the log, while the database does not take it."""
        try:
            if not self._active:
                await table.activate_version(self._store, self._model.version)
                self._active = True
            if not self._loaded:
                await self._load()
            await self._save()
        except StoreUnavailable as error:
            if self._up:
                log.warning("the database is away; serving goes on from memory", reason=error.message)
            self._up = self._active = False  # it may come back as another, empty one
        else:
            if not self._up:
                log.info("the database is back", waiting_samples=len(self._samples))
            self._up = True
        self._metrics.store_up.set(self._up)
        return self._up

    async def _load(self) -> None:
        states = await table.load_states(self._store, self._model.version, limit=self._load_scopes)
        kept = [(Scope(state.level, state.tenant, state.adapter), state.statistics) for state in states]
        for start in range(0, len(kept), ROWS_PER_WRITE):
            for scope, why in self._model.restore(kept[start : start + ROWS_PER_WRITE]):
                log.warning("kept statistics cannot be read and are learned again", scope=scope, reason=why)
            await asyncio.sleep(0)
        self._loaded = True
        log.info("loaded", version=self._model.version, scopes=len(states))

    async def _save(self) -> None:
        for _ in range(0, max(self._model.unsaved_count, len(self._samples)), ROWS_PER_WRITE):
            await self._save_some()

    async def _save_some(self) -> None:
        """Some rows, together. If one of them is refused for ever, the halves apart, until it stands alone."""
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
        except BaseException:  # cancellation included: what was not written must be written at stop
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
            "a row is put aside, since the database never takes it",
            table=table.name_of(row),
            tenant=row.tenant,
            adapter=row.adapter,
            reason=error.message,
        )
