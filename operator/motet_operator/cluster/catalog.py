"""What is gone, and what only seems to be. When the definition of a kind is deleted, every object of it goes with it,
one by one, and nobody has asked for any of that: serving goes on with what was last known, for a while."""

import structlog

from motet.clock import Clock, monotonic
from motet_operator.cluster.api import Api, ApiError
from motet_operator.cluster.cache import Key
from motet_operator.cluster.decide import Snapshot
from motet_operator.cluster.kinds import ADAPTERS, POOLS, Kind

log = structlog.get_logger(__name__)

LOOK_SECONDS = 5.0


class Continuity:
    """Asks the API server, whenever objects have gone, whether their kind is still served."""

    def __init__(self, api: Api, grace_seconds: float, clock: Clock = monotonic) -> None:
        self._api, self._grace, self._clock = api, grace_seconds, clock
        self._seen: dict[Kind, frozenset[Key]] = {}
        self._until: float | None = None

    async def check(self, snapshot: Snapshot) -> float | None:
        """None: what is seen is what is. Else nothing may be done now, and the seconds until another look."""
        now = self._clock()
        keys = {kind: frozenset(snapshot[kind]) for kind in (ADAPTERS, POOLS)}
        gone = [kind for kind, here in keys.items() if self._seen.get(kind, frozenset()) - here]
        if gone and not await self._all_served(gone):
            if self._until is None:
                self._until = now + self._grace
                log.warning(
                    "a kind is no longer served; what was last known goes on", kinds=[str(kind) for kind in gone]
                )
            if now < self._until:
                return min(LOOK_SECONDS, self._until - now)
        else:
            if self._until is not None:
                log.info("every kind is served again")
            self._until = None
        self._seen = keys
        return None

    async def _all_served(self, kinds: list[Kind]) -> bool:
        try:
            # A definition that is being deleted still lets its objects be read.
            return all(["create" in await self._api.verbs(kind) for kind in kinds])
        except ApiError:
            return False
