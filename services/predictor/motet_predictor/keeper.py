"""Between the model in memory and the database: loads once, writes in batches, and outlives the database's absence."""

from collections import deque

import structlog

from motet.errors import StoreUnavailable
from motet.store import Store
from motet.store import lengths as table
from motet_predictor.metrics import Metrics
from motet_predictor.model import LengthModel, Scope

log = structlog.get_logger(__name__)


class Keeper:
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
        self._samples: deque[table.Sample] = deque(maxlen=queued_samples)
        self._loaded = False
        self._active = False
        self._up = True

    def add(self, sample: table.Sample) -> None:
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
        kept = ((Scope(state.level, state.tenant, state.adapter), state.statistics) for state in states)
        for scope, why in self._model.restore(kept):
            log.warning("kept statistics cannot be read and are learned again", scope=scope, reason=why)
        self._loaded = True
        log.info("loaded", version=self._model.version, scopes=len(states))

    async def _save(self) -> None:
        changes = self._model.changes()
        samples = list(self._samples)
        if not changes and not samples:
            return
        self._samples.clear()
        states = [table.State(scope.level, scope.tenant, scope.adapter, data) for scope, data in changes]
        try:
            await table.save(self._store, self._model.version, states, samples, keep_samples=self._keep_samples)
        except BaseException:  # cancellation included: what was not written must be written at stop
            self._model.unsaved(scope for scope, _ in changes)
            since = list(self._samples)
            self._samples.clear()
            for sample in samples + since:
                self.add(sample)
            raise
