"""Lists every kind now and then and sets the cache right by it: what a watch has lost is found within minutes.

Also the gate: until each kind has been listed once, nobody knows what is missing, so nothing is done.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Sequence

import structlog

from motet.kube import ApiError
from motet_operator.cluster.api import Api, Refused
from motet_operator.cluster.cache import Cache
from motet_operator.cluster.denials import Denials
from motet_operator.cluster.kinds import CHILDREN, OURS, Kind, Object
from motet_operator.cluster.view import POOL_LABEL
from motet_operator.metrics import ClusterMetrics

log = structlog.get_logger(__name__)

FIRST_RETRY_SECONDS = 0.5
LAST_RETRY_SECONDS = 5.0

FEW = 5
SMALL_SHARE = 0.2
"""What a list lacks beyond both is asked for once more: a server that lags, or one that was restored from an old copy,
must not take half the adapters out of service."""


class Resync:
    def __init__(
        self,
        api: Api,
        cache: Cache,
        denials: Denials,
        metrics: ClusterMetrics,
        pool_namespaces: Sequence[str],
        *,
        seconds: float,
        changed: Callable[[], None],
        returned: Callable[[Kind], None],
        time_scale: float = 1.0,
    ) -> None:
        """`returned` is called with a kind that is served again after it was not."""
        self._api, self._cache, self._denials, self._metrics = api, cache, denials, metrics
        self._places = [(kind, "") for kind in OURS]
        self._places += [(kind, namespace) for kind in CHILDREN for namespace in pool_namespaces]
        self._seconds = seconds * time_scale
        self._scale = time_scale
        self._changed, self._returned = changed, returned
        self._hurry = asyncio.Event()
        self._seen: set[tuple[Kind, str]] = set()
        self._problems: dict[tuple[Kind, str], str] = {}
        self.missing: set[Kind] = set()
        """Kinds of ours that the API server does not know now."""
        self.listed = asyncio.Event()

    def hurry(self) -> None:
        """Something odd happened: look now."""
        self._hurry.set()

    def waiting_for(self) -> str:
        """What has not been listed yet, and why."""
        left = [place for place in self._places if place not in self._seen]
        if not left:
            return ""
        kind, namespace = left[0]
        where = f" in {namespace}" if namespace else ""
        return f"{kind.resource}{where} not listed yet: {self._problems.get(left[0], 'asking')}"

    async def run(self) -> None:
        """Until cancelled."""
        wait = FIRST_RETRY_SECONDS
        while True:
            complete = await self.once()
            if complete:
                wait = FIRST_RETRY_SECONDS
                pause = self._seconds * random.uniform(0.9, 1.1)  # noqa: S311 - spreads load, guards nothing
            else:
                pause, wait = wait * random.uniform(0.5, 1.0), min(LAST_RETRY_SECONDS, wait * 2)  # noqa: S311
                pause *= self._scale
            try:
                async with asyncio.timeout(pause):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            self._hurry.clear()

    async def once(self) -> bool:
        """Whether everything could be listed."""
        complete = True
        for place in self._places:
            complete = await self._list(*place) and complete
        if not self.listed.is_set() and len(self._seen) == len(self._places):
            self.listed.set()
            self._metrics.listed.set(1)
            self._changed()
        return complete

    async def _list(self, kind: Kind, namespace: str) -> bool:
        place = (kind, namespace)
        try:
            items, version = await self._ask(kind, namespace, fresh=place not in self._seen)
            if self._lacks_much(kind, namespace, items, version):
                log.warning("a list lacks much that is known; asking what is stored", kind=kind.name, listed=len(items))
                items, version = await self._ask(kind, namespace, fresh=True)
        except ApiError as error:
            self._complain(place, error)
            return False
        self._problems.pop(place, None)
        self._denials.clear(kind, namespace)
        if kind in self.missing:
            self.missing.discard(kind)
            log.info("a kind is served again", kind=kind.name)
            self._returned(kind)
        first = place not in self._seen
        self._seen.add(place)
        repairs = self._cache.replace(kind, items, version, namespace)
        if repairs.any and not first:
            log.info("a list knew better than the watch", kind=kind.name, repairs=str(repairs))
            for name in ("added", "changed", "removed"):
                self._metrics.repairs.labels(kind.plural, name).inc(getattr(repairs, name))
        return True

    async def _ask(self, kind: Kind, namespace: str, *, fresh: bool) -> tuple[list[Object], int]:
        return await self._api.list(kind, namespace, selector=POOL_LABEL if kind in CHILDREN else "", fresh=fresh)

    def _lacks_much(self, kind: Kind, namespace: str, items: Collection[Object], version: int) -> bool:
        lost = len(self._cache.unlisted(kind, items, version, namespace))
        return lost > max(FEW, SMALL_SHARE * self._cache.count(kind, namespace))

    def _complain(self, place: tuple[Kind, str], error: ApiError) -> None:
        kind, namespace = place
        if isinstance(error, Refused) and error.gone and kind in OURS:
            self.missing.add(kind)
        if isinstance(error, Refused) and error.forbidden:
            self._denials.note(error)
            self._changed()
        if self._problems.get(place) != str(error):
            self._problems[place] = str(error)
            log.warning("cannot list", kind=kind.name, namespace=namespace, error=str(error)[:300])
