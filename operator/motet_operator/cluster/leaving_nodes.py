"""Which nodes are to be emptied, so that runners there move: those that are cordoned, since a drain begins with that,
and those with a taint by which an autoscaler says so.

Asked for now and then, and only those that matter: a watch would bring every word of every node of a large cluster. The
API server finds the cordoned ones by a field, and taints by none; so each node with a runner is asked for by its name.
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
        """`taints` are keys; `hosts` are the nodes with runners. Nobody is asked while there are none."""
        self._api, self._obstacle_log, self._seconds = api, obstacle_log, seconds
        self._taints, self._hosts, self._changed = frozenset(taints), hosts, changed
        self._last_error = ""
        self.nodes: frozenset[str] = frozenset()
        """By name. The last answer stays while there is no other."""

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
