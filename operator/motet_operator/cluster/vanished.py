"""What is gone, and what only seems to be. When the definition of a kind is deleted, every object of it goes with it,
one by one, and nobody has asked for any of that: serving goes on with what was last known, for a while, also when the
definition is back and its objects are not yet.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from motet.clock import Clock, monotonic
from motet.kube import ApiError
from motet_operator.cluster.api import Api
from motet_operator.cluster.cache import ObjectKey, Snapshot
from motet_operator.cluster.decision import VANISHED
from motet_operator.cluster.kinds import ADAPTERS, POOLS, Kind, Object

log = structlog.get_logger(__name__)

ANSWER_SECONDS = 5.0
"""A round waits no longer for an answer; the next one asks again."""

ASK_AGAIN_SECONDS = 1.0


@dataclass(slots=True)
class VanishedObject:
    object: Object
    until: float
    certain: bool = False
    """Its kind is known to have gone. Before that it may have been deleted as anything else is."""


class VanishedObjects:
    """Asks the API server, whenever objects have gone, whether their kind is still served."""

    def __init__(self, api: Api, grace_seconds: float, clock: Clock = monotonic) -> None:
        self._api, self._grace, self._clock = api, grace_seconds, clock
        self._seen: dict[Kind, Mapping[ObjectKey, Object]] = {ADAPTERS: {}, POOLS: {}}
        self._vanished: dict[Kind, dict[ObjectKey, VanishedObject]] = {ADAPTERS: {}, POOLS: {}}

    async def complete(self, snapshot: Snapshot) -> Snapshot:
        """With the ghosts of what nobody has asked to go, and of what perhaps nobody has."""
        now, whole = self._clock(), dict(snapshot)
        for kind, vanished in self._vanished.items():
            here = snapshot[kind]
            for key in self._seen[kind].keys() - here.keys():
                vanished[key] = VanishedObject(self._seen[kind][key] | {VANISHED: True}, now + self._grace)
            self._seen[kind] = here
            for key in [key for key, one in vanished.items() if key in here or now >= one.until]:
                del vanished[key]
            if doubtful := [key for key, one in vanished.items() if not one.certain]:
                await self._ask_whether_served(kind, vanished, doubtful)
            if vanished:
                whole[kind] = {**here, **{key: one.object for key, one in vanished.items()}}
        return whole

    def due(self) -> float | None:
        """Seconds after which the first ghost is laid to rest, or is asked about again."""
        now = self._clock()
        ends = [
            one.until if one.certain else min(one.until, now + ASK_AGAIN_SECONDS)
            for vanished in self._vanished.values()
            for one in vanished.values()
        ]
        return max(0.05, min(ends) - now) if ends else None

    async def _ask_whether_served(
        self, kind: Kind, vanished: dict[ObjectKey, VanishedObject], doubtful: list[ObjectKey]
    ) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                # A definition that is being deleted still lets its objects be read.
                served = "create" in await self._api.verbs(kind)
        except (ApiError, TimeoutError):
            return
        if not served:
            log.warning(
                "kind_vanished",
                kind=str(kind),
                objects=len(doubtful),
                hint="The API server no longer serves this kind; Motet keeps serving what it last knew.",
            )
        for key in doubtful:
            if served:
                del vanished[key]
            else:
                vanished[key].certain = True
