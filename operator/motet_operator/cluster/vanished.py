"""Keeps objects that vanished because their kind did. If somebody deletes a CustomResourceDefinition, all its objects
are deleted with it. Motet then keeps serving what it last knew for a while, also after the definition is installed
again and before its objects are.
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
"""A round waits at most this long for the answer; the next round asks again."""

ASK_AGAIN_SECONDS = 1.0


@dataclass(slots=True)
class VanishedObject:
    object: Object
    until: float
    certain: bool = False
    """The kind is known to be gone. Until then the object may have been deleted on purpose."""


class VanishedObjects:
    """Asks the API server, whenever objects have gone, whether their kind is still served."""

    def __init__(self, api: Api, grace_seconds: float, clock: Clock = monotonic) -> None:
        self._api, self._grace, self._clock = api, grace_seconds, clock
        self._seen: dict[Kind, Mapping[ObjectKey, Object]] = {ADAPTERS: {}, POOLS: {}}
        self._vanished: dict[Kind, dict[ObjectKey, VanishedObject]] = {ADAPTERS: {}, POOLS: {}}

    async def complete(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with vanished objects, and with deleted ones while it is unknown whether their kind vanished."""
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
        """Seconds until the first vanished object expires, or until the API server is asked again."""
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
                # While a definition is being deleted its objects can still be read, but not created.
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
