"""What is gone, and what only seems to be. When the definition of a kind is deleted, every object of it goes with it,
one by one, and nobody has asked for any of that: serving goes on with what was last known, for a while, also when the
definition is back and its objects are not yet.
"""

from collections.abc import Mapping

import structlog

from motet.clock import Clock, monotonic
from motet.kube import ApiError
from motet_operator.cluster.api import Api
from motet_operator.cluster.cache import Key
from motet_operator.cluster.decide import GHOST, Snapshot
from motet_operator.cluster.kinds import ADAPTERS, POOLS, Kind, Object

log = structlog.get_logger(__name__)


class Continuity:
    """Asks the API server, whenever objects have gone, whether their kind is still served."""

    def __init__(self, api: Api, grace_seconds: float, clock: Clock = monotonic) -> None:
        self._api, self._grace, self._clock = api, grace_seconds, clock
        self._seen: dict[Kind, Mapping[Key, Object]] = {ADAPTERS: {}, POOLS: {}}
        self._ghosts: dict[Kind, dict[Key, tuple[Object, float]]] = {ADAPTERS: {}, POOLS: {}}

    async def complete(self, snapshot: Snapshot) -> Snapshot:
        """With the ghosts of what nobody has asked to go."""
        now, whole = self._clock(), dict(snapshot)
        for kind, ghosts in self._ghosts.items():
            here = snapshot[kind]
            gone = self._seen[kind].keys() - here.keys()
            if gone and not await self._is_served(kind):
                log.warning(
                    "a kind is no longer served; what was last known goes on", kind=str(kind), objects=len(gone)
                )
                for key in gone:
                    ghosts[key] = (self._seen[kind][key] | {GHOST: True}, now + self._grace)
            self._seen[kind] = here
            for key in [key for key, (_, until) in ghosts.items() if key in here or now >= until]:
                del ghosts[key]
            if ghosts:
                whole[kind] = {**here, **{key: it for key, (it, _) in ghosts.items()}}
        return whole

    def due(self) -> float | None:
        """Seconds after which the first ghost is laid to rest."""
        ends = [until for ghosts in self._ghosts.values() for _, until in ghosts.values()]
        return max(0.05, min(ends) - self._clock()) if ends else None

    async def _is_served(self, kind: Kind) -> bool:
        try:
            # A definition that is being deleted still lets its objects be read.
            return "create" in await self._api.verbs(kind)
        except ApiError:
            return False
