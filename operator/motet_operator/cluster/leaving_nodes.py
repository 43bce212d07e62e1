"""Which nodes are about to be emptied, so that their runners move: cordoned nodes, because a drain starts so, and
nodes with a taint that an autoscaler sets before it removes them.

Nodes are polled: a watch would send every status update of every node of a large cluster. The API server can select
cordoned nodes by a field, but not tainted ones, so each node with a runner is requested by its name.
"""

import asyncio
import random
from collections.abc import Callable, Collection

import structlog

from motet.kube import ApiError
from motet_operator.cluster.api import Api, ApiRefused
from motet_operator.cluster.kinds import NODES, Object
from motet_operator.cluster.obstacles import ObstacleLog

log = structlog.get_logger(__name__)

CORDONED = "spec.unschedulable=true"


class LeavingNodes:
    def __init__(
        self,
        api: Api,
        obstacle_log: ObstacleLog,
        *,
        seconds: float,
        taints: Collection[str],
        hosts: Callable[[], Collection[str]],
        changed: Callable[[], None],
    ) -> None:
        """`taints` are keys; `hosts` are the nodes with runners. Without hosts the API server is not asked."""
        self._api, self._obstacle_log, self._seconds = api, obstacle_log, seconds
        self._taints, self._hosts, self._changed = frozenset(taints), hosts, changed
        self._last_error = ""
        self.nodes: frozenset[str] = frozenset()
        """Names; the last answer, also while the API server does not answer."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._seconds * random.uniform(0.9, 1.1))  # noqa: S311 - spreads load, guards nothing
            await self.refresh()

    async def refresh(self) -> None:
        hosts = frozenset(self._hosts())
        if not hosts:
            self._set(frozenset())
            return
        try:
            found, _ = await self._api.list(NODES, fields=CORDONED)
            leaving = {node["metadata"]["name"] for node in found}
            if self._taints:
                leaving |= {host for host in sorted(hosts - leaving) if await self._is_tainted(host)}
        except ApiError as error:
            self._note_error(error)
            return
        self._last_error = ""
        self._obstacle_log.clear(NODES, "")
        self._set(frozenset(leaving))

    async def _is_tainted(self, host: str) -> bool:
        found, _ = await self._api.list(NODES, fields=f"metadata.name={host}")
        return any(taint["key"] in self._taints for node in found for taint in _taints_of(node))

    def _set(self, nodes: frozenset[str]) -> None:
        if nodes != self.nodes:
            log.info("leaving_nodes_changed", nodes=sorted(nodes))
            self.nodes = nodes
            self._changed()

    def _note_error(self, error: ApiError) -> None:
        if isinstance(error, ApiRefused) and error.forbidden:
            self._obstacle_log.note(error)
        if self._last_error != str(error):
            self._last_error = str(error)
            log.warning(
                "node_list_failed",
                error=str(error)[:300],
                hint="Until nodes can be listed, runners on cordoned nodes stay there until they are evicted.",
            )


def _taints_of(node: Object) -> Collection[Object]:
    return (node.get("spec") or {}).get("taints") or ()
