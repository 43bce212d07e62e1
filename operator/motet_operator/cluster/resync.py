"""Lists every kind now and then and sets the cache right by it: what a watch has lost is found within minutes.

Also the gate: until each kind of ours has been listed once, nobody knows what is missing, so nothing is done. Where
pools run it is a gate for each namespace: what cannot be seen there stops that namespace, and no other.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Sequence

import structlog

from motet.clock import monotonic
from motet.kube import ApiError
from motet_operator.cluster.api import Api, Refused
from motet_operator.cluster.cache import Cache
from motet_operator.cluster.denials import Denials
from motet_operator.cluster.kinds import CHILDREN, DEPLOYMENTS, OURS, PODS, Kind, Object
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
        unwatchable: Callable[[str], None],
        time_scale: float = 1.0,
    ) -> None:
        """`returned` is called with a kind that is served again after it was not, `unwatchable` with the path of what
        is forbidden or not served."""
        self._api, self._cache, self._denials, self._metrics = api, cache, denials, metrics
        self._places = [(kind, "") for kind in OURS]
        self._places += [(kind, namespace) for kind in CHILDREN for namespace in pool_namespaces]
        self._seconds = seconds * time_scale
        self._scale = time_scale
        self._changed, self._returned, self._unwatchable = changed, returned, unwatchable
        self._hurry = asyncio.Event()
        self._seen: set[tuple[Kind, str]] = set()
        self._refused: set[tuple[Kind, str]] = set()
        self._problems: dict[tuple[Kind, str], str] = {}
        self.missing: set[Kind] = set()
        """Kinds of ours that the API server does not know now."""
        self.listed = asyncio.Event()

    def hurry(self) -> None:
        """Something odd happened: look now."""
        self._hurry.set()

    def waiting_for(self) -> str:
        """What has not been listed yet, and why. What may not be listed where pools are, they tell themselves."""
        left = [place for place in self._places if place not in self._seen | self._refused]
        if not left:
            return ""
        kind, namespace = left[0]
        where = f" in {namespace}" if namespace else ""
        return f"{kind.resource}{where} not listed yet: {self._problems.get(left[0], 'asking')}"

    @property
    def unseen(self) -> frozenset[str]:
        """Namespaces in which nobody knows what a pool has: it was never listed, or may not be any more."""
        return frozenset(
            namespace
            for kind, namespace in self._places
            if kind in (DEPLOYMENTS, PODS) and (kind, namespace) not in self._seen
        )

    async def run(self) -> None:
        """Until cancelled. What could not be listed is asked for again soon, and alone."""
        places, due, wait = self._places, 0.0, FIRST_RETRY_SECONDS
        while True:
            if places is self._places:
                due = monotonic() + self._seconds * random.uniform(0.9, 1.1)  # noqa: S311 - spreads load, guards nothing
            left = await self._look(places)
            pause = due - monotonic()
            if left:
                pause = min(pause, wait * random.uniform(0.5, 1.0) * self._scale)  # noqa: S311
                wait = min(LAST_RETRY_SECONDS, wait * 2)
            else:
                wait = FIRST_RETRY_SECONDS
            try:
                async with asyncio.timeout(max(0.0, pause)):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            places = left if left and not self._hurry.is_set() and monotonic() < due else self._places
            self._hurry.clear()

    async def once(self) -> bool:
        """Whether everything could be listed."""
        return not await self._look(self._places)

    async def _look(self, places: Sequence[tuple[Kind, str]]) -> list[tuple[Kind, str]]:
        """Those that could not be listed."""
        left = [place for place in places if not await self._list(*place)]
        if not self.listed.is_set() and all((kind, "") in self._seen for kind in OURS):
            self.listed.set()
            self._metrics.listed.set(1)
            self._changed()
        return left

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
        self._refused.discard(place)
        self._denials.clear(kind, namespace)
        if kind in self.missing:
            self.missing.discard(kind)
            log.info("a kind is served again", kind=kind.name)
            self._returned(kind)
        first = place not in self._seen
        self._seen.add(place)
        repairs = self._cache.replace(kind, items, version, namespace)
        if first:
            self._changed()
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
        if isinstance(error, Refused) and (error.forbidden or error.gone):
            self._unwatchable(kind.path(namespace))
            if kind in CHILDREN:  # what was seen there is getting old
                self._seen.discard(place)
                self._refused.add(place)
        if self._problems.get(place) != str(error):
            self._problems[place] = str(error)
            log.warning("cannot list", kind=kind.name, namespace=namespace, error=str(error)[:300])
