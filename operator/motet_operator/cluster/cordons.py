"""Which nodes are cordoned: a drain begins with that, and runners there are to move.

Asked for now and then, and only those: a watch would bring every word of every node of a large cluster.
"""

import asyncio
import random
from collections.abc import Callable

import structlog

from motet.kube import ApiError
from motet_operator.cluster.api import Api, Refused
from motet_operator.cluster.denials import Denials
from motet_operator.cluster.kinds import NODES

log = structlog.get_logger(__name__)

CORDONED = "spec.unschedulable=true"


class Cordons:
    def __init__(
        self,
        api: Api,
        denials: Denials,
        *,
        seconds: float,
        needed: Callable[[], bool],
        changed: Callable[[], None],
    ) -> None:
        """Nobody is asked while it is not `needed`."""
        self._api, self._denials, self._seconds = api, denials, seconds
        self._needed, self._changed = needed, changed
        self._problem = ""
        self.nodes: frozenset[str] = frozenset()
        """By name. The last answer stays while there is no other."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._seconds * random.uniform(0.9, 1.1))  # noqa: S311 - spreads load, guards nothing
            await self.look()

    async def look(self) -> None:
        if not self._needed():
            self._now(frozenset())
            return
        try:
            found, _ = await self._api.list(NODES, fields=CORDONED)
        except ApiError as error:
            self._complain(error)
            return
        self._problem = ""
        self._denials.clear(NODES, "")
        self._now(frozenset(node["metadata"]["name"] for node in found))

    def _now(self, nodes: frozenset[str]) -> None:
        if nodes != self.nodes:
            log.info("cordoned nodes", nodes=sorted(nodes))
            self.nodes = nodes
            self._changed()

    def _complain(self, error: ApiError) -> None:
        if isinstance(error, Refused) and error.forbidden:
            self._denials.note(error)
        if self._problem != str(error):
            self._problem = str(error)
            log.warning("cannot list cordoned nodes: no runner leaves before it is evicted", error=str(error)[:300])
