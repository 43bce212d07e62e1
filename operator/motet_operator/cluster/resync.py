"""Lists every kind from time to time and corrects the cache, so that events that a watch lost are found within minutes.

The API server's store may be restored to an earlier state (an etcd backup). Its versions are lower then, and a watch
that continues from a higher version receives nothing until the store has passed it. Therefore the stored version is
requested whenever a watch opens, and a list that proves to be older replaces the cache. Until every other kind has been
listed again, the cache mixes two states, and no decision is made.

This module also holds back the first round: until each declared kind has been listed once, it is unknown what exists.
In the namespaces of pools this is so for each namespace: a forbidden list stops that namespace only.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Sequence

import structlog

from motet.clock import monotonic
from motet.kube import ApiError
from motet.task_group import run_together
from motet_operator.cluster.api import Api, ApiRefused
from motet_operator.cluster.cache import Cache
from motet_operator.cluster.kinds import DECLARED_KINDS, DEPLOYMENTS, OWNED_KINDS, PODS, Kind, Object, selector
from motet_operator.cluster.obstacles import ObstacleLog
from motet_operator.metrics import ClusterMetrics

log = structlog.get_logger(__name__)

FIRST_RETRY_SECONDS = 0.5
LAST_RETRY_SECONDS = 5.0

FEW = 5
SMALL_SHARE = 0.2
"""If a list lacks more objects than both bounds, it is requested once more: a server that lags, or was restored from a
backup, must not take half of the adapters out of service."""


class Resync:
    def __init__(
        self,
        api: Api,
        cache: Cache,
        obstacle_log: ObstacleLog,
        metrics: ClusterMetrics,
        pool_namespaces: Sequence[str],
        *,
        seconds: float,
        changed: Callable[[], None],
        restart_watch: Callable[[Kind], None],
        unwatchable: Callable[[str], None],
        operator_class: str = "",
        time_scale: float = 1.0,
    ) -> None:
        """`restart_watch` is called with a kind that is served again, or whose versions went back. `unwatchable` is
        called with the path of a kind that is forbidden or not served."""
        self._api, self._cache, self._obstacle_log, self._metrics = api, cache, obstacle_log, metrics
        # Pools come after the objects that they own. When a pool is deleted, its Deployments are deleted next. In the
        # other order the pool could be listed and its Deployment not, and the Deployment would be created again.
        self.scopes = [(kind, namespace) for kind in OWNED_KINDS for namespace in pool_namespaces]
        self.scopes += [(kind, "") for kind in DECLARED_KINDS]
        self._class = operator_class
        self._seconds = seconds * time_scale
        self._scale = time_scale
        self._changed, self._restart_watch, self._unwatchable = changed, restart_watch, unwatchable
        self._requested = asyncio.Event()
        self._by_path = {kind.path(namespace): (kind, namespace) for kind, namespace in self.scopes}
        self._opened: asyncio.Queue[tuple[Kind, str]] = asyncio.Queue()
        self._min_versions: dict[tuple[Kind, str], int] = {}
        """The version of the last list, or a later one that a watch started from."""
        self._seen: set[tuple[Kind, str]] = set()
        self._refused: set[tuple[Kind, str]] = set()
        self._problems: dict[tuple[Kind, str], str] = {}
        self._rewound: set[Kind] = set()
        self._from_before: set[tuple[Kind, str]] = set()
        """Scopes that have not been listed since the store was found to be restored."""
        self.missing: set[Kind] = set()
        """Motet's kinds that the API server does not serve now."""
        self.listed = asyncio.Event()

    def request_now(self) -> None:
        """List everything now, because something unexpected happened."""
        self._requested.set()

    def watch_opened(self, path: str, since: int) -> None:
        """A watch opened, perhaps to a restored store: check that the store is not older than the cache."""
        if (scope := self._by_path.get(path)) is not None:
            self._min_versions[scope] = max(self._min_versions.get(scope, 0), since)
            self._opened.put_nowait(scope)

    def waiting_for(self) -> str:
        """What has not been listed yet, and why. Pools report forbidden lists in their namespaces themselves."""
        left = [scope for scope in self.scopes if scope not in self._seen | self._refused]
        if not left:
            return ""
        kind, namespace = left[0]
        where = f" in {namespace}" if namespace else ""
        return f"{kind.resource}{where} not listed yet: {self._problems.get(left[0], 'asking')}"

    @property
    def of_one_state(self) -> bool:
        """False while the cache mixes the state before a restore of the store with the state after it."""
        return not self._from_before

    @property
    def unseen(self) -> frozenset[str]:
        """Namespaces whose runners are unknown: they were never listed, or may not be listed any more."""
        return frozenset(
            namespace
            for kind, namespace in self.scopes
            if kind in (DEPLOYMENTS, PODS) and (kind, namespace) not in self._seen
        )

    async def run(self) -> None:
        """Until cancelled."""
        await run_together(self._list_for_ever(), self._probe_for_ever())

    async def _probe_for_ever(self) -> None:
        while True:
            scope = await self._opened.get()
            seen = self._seen_of(scope)
            try:
                known = await self._api.newest(*scope) >= seen
            except ApiError:
                known = False  # unknown: list until an answer comes
            if not known:
                self.request_now()

    async def _list_for_ever(self) -> None:
        """Scopes that could not be listed are retried soon, without the others."""
        scopes, due, wait = self.scopes, 0.0, FIRST_RETRY_SECONDS
        while True:
            if scopes is self.scopes:
                due = monotonic() + self._seconds * random.uniform(0.9, 1.1)  # noqa: S311 - spreads load, guards nothing
            left = await self._list_all(scopes)
            pause = due - monotonic()
            if left:
                pause = min(pause, wait * random.uniform(0.5, 1.0) * self._scale)  # noqa: S311
                wait = min(LAST_RETRY_SECONDS, wait * 2)
            else:
                wait = FIRST_RETRY_SECONDS
            try:
                async with asyncio.timeout(max(0.0, pause)):
                    await self._requested.wait()
            except TimeoutError:
                pass
            scopes = left if left and not self._requested.is_set() and monotonic() < due else self.scopes
            self._requested.clear()

    async def once(self) -> bool:
        """Whether everything could be listed."""
        return not await self._list_all(self.scopes)

    async def _list_all(self, scopes: Sequence[tuple[Kind, str]]) -> list[tuple[Kind, str]]:
        """Those that could not be listed."""
        left = [scope for scope in scopes if not await self.list_one(*scope)]
        rewound, self._rewound = self._rewound, set()
        for kind in rewound:
            self._restart_watch(kind)
        if not self.listed.is_set() and all((kind, "") in self._seen for kind in DECLARED_KINDS):
            self.listed.set()
            self._metrics.listed.set(1)
            self._changed()
        return left

    async def list_one(self, kind: Kind, namespace: str) -> bool:
        scope = (kind, namespace)
        seen = self._seen_of(scope)
        try:
            items, version = await self._ask(kind, namespace, fresh=scope not in self._seen)
            if distrust := self._distrust_reason(scope, items, version, seen):
                log.warning("stale_list", why=distrust, kind=kind.name, listed=len(items))
                items, version = await self._ask(kind, namespace, fresh=True)
        except ApiError as error:
            self._note_error(scope, error)
            return False
        self._problems.pop(scope, None)
        self._refused.discard(scope)
        self._obstacle_log.clear(kind, namespace)
        if kind in self.missing:
            self.missing.discard(kind)
            log.info("kind_served_again", kind=kind.name)
            self._restart_watch(kind)
        first = scope not in self._seen
        self._seen.add(scope)
        self._min_versions[scope] = version
        if version < seen or self._cache.contradicted_by(kind, items, version, namespace):
            log.warning("kubernetes_store_rewound", kind=kind.name, version=version, seen=seen)
            self._metrics.rewinds.labels(kind.plural).inc()
            self._rewound.add(kind)
            if scope not in self._from_before:  # the first scope that shows the restore
                self._from_before = set(self.scopes) - self._refused
                self.request_now()
            self._cache.rewind(kind, items, namespace)
            self._note_current(scope)
            return True
        repairs = self._cache.replace(kind, items, version, namespace)
        self._note_current(scope)
        if first:
            self._changed()
        if repairs.any and not first:
            log.info("watch_missed_changes", kind=kind.name, repairs=str(repairs))
            for name in ("added", "changed", "removed"):
                self._metrics.repairs.labels(kind.plural, name).inc(getattr(repairs, name))
        return True

    def _note_current(self, scope: tuple[Kind, str]) -> None:
        """The scope is current, or cannot be listed."""
        if scope in self._from_before:
            self._from_before.discard(scope)
            if not self._from_before:
                self._changed()

    async def _ask(self, kind: Kind, namespace: str, *, fresh: bool) -> tuple[list[Object], int]:
        return await self._api.list(kind, namespace, selector=selector(kind, self._class), fresh=fresh)

    def _seen_of(self, scope: tuple[Kind, str]) -> int:
        """The store has at least this version."""
        return max(self._min_versions.get(scope, 0), self._cache.newest(*scope))

    def _distrust_reason(self, scope: tuple[Kind, str], items: Collection[Object], version: int, seen: int) -> str:
        """Why a list is not trusted at once; empty if it is."""
        kind, namespace = scope
        lost = len(self._cache.unlisted(kind, items, version, namespace))
        if lost > max(FEW, SMALL_SHARE * self._cache.count(kind, namespace)):
            return "the list lacks many known objects"
        if version < seen or self._cache.contradicted_by(kind, items, version, namespace):
            return "the list is older than the cache"
        return ""

    def _note_error(self, scope: tuple[Kind, str], error: ApiError) -> None:
        kind, namespace = scope
        if isinstance(error, ApiRefused) and error.gone and kind in DECLARED_KINDS:
            self.missing.add(kind)
        if isinstance(error, ApiRefused) and error.forbidden:
            self._obstacle_log.note(error)
            self._changed()
        if isinstance(error, ApiRefused) and (error.forbidden or error.gone):
            self._unwatchable(kind.path(namespace))
            if kind in OWNED_KINDS:  # what was seen there is out of date
                self._seen.discard(scope)
                self._refused.add(scope)
            self._note_current(scope)
        if self._problems.get(scope) != str(error):
            self._problems[scope] = str(error)
            log.warning("list_failed", kind=kind.name, namespace=namespace, error=str(error)[:300])
