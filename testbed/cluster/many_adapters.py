"""Many adapters in a cluster, and what an operator writes about them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from motet.kube import KubeCredentials
from motet_operator.cluster.api import Api, RequestLimiter
from motet_operator.cluster.kinds import ADAPTERS, NAMESPACES, POOLS
from motet_operator.metrics import ClusterMetrics
from testbed.cluster.cluster import Cluster
from testbed.cluster.operators import OperatorNamespaces

REAL_TIME = {
    "MOTET_TIME_SCALE": "1",
    "MOTET_LEASE_SECONDS": "15",
    "MOTET_LEASE_RENEW_SECONDS": "10",
    "MOTET_LEASE_RETRY_SECONDS": "2",
}
"""The values of production. In tests, operators use shorter times, but longer Leases."""


@asynccontextmanager
async def admin_api(cluster: Cluster) -> AsyncIterator[Api]:
    """A client with the administrator's permissions and without a rate limit."""
    api = Api(
        KubeCredentials(cluster.kubeconfig, "KUBECONFIG"), RequestLimiter(1e6, 1e6), ClusterMetrics(CollectorRegistry())
    )
    try:
        yield api
    finally:
        await api.close()


async def populate(api: Api, home: OperatorNamespaces, adapters: int, namespaces: int, prefix: str) -> list[str]:
    """Create adapters in many tenants. Returns the tenants."""
    tenants = [f"{home.name}-{prefix}-{number}" for number in range(namespaces)]
    limit = asyncio.Semaphore(16)

    async def apply(kind: Any, document: dict[str, Any]) -> None:
        async with limit:
            await api.apply(kind, document, manager="benchmark")

    await apply(POOLS, home.pool())
    await asyncio.gather(
        *(apply(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}) for name in tenants)
    )
    await asyncio.gather(
        *(
            apply(ADAPTERS, home.adapter(f"adapter-{number}", tenants[number % namespaces]))
            for number in range(adapters)
        )
    )
    return tenants


async def wait_for_status(
    api: Api, tenants: Sequence[str], adapters: int, check_alive: Callable[[], None], within_s: float
) -> None:
    """Wait until all adapters have their status. The more there are, the less often it lists them: a list of all slows
    the API server's writes."""
    deadline, mine, done = time.monotonic() + within_s, set(tenants), 0
    while time.monotonic() < deadline:
        check_alive()
        items, _ = await api.list(ADAPTERS, *(tenants if len(tenants) == 1 else ()))
        done = sum(
            (it.get("status") or {}).get("observedGeneration") == it["metadata"]["generation"]
            for it in items
            if it["metadata"]["namespace"] in mine
        )
        if done >= adapters:
            return
        await asyncio.sleep(max(0.1, adapters / 500))
    raise AssertionError(f"only {done} of {adapters} adapters had their status after {within_s} s")


def last_status(cluster: Cluster, tenants: Sequence[str]) -> datetime:
    """When the last status in these tenants was written, from the audit log."""
    mine = set(tenants)
    return max(
        datetime.fromisoformat(entry["stageTimestamp"])
        for entry in cluster.audit()
        if entry["verb"] == "patch"
        and entry["objectRef"]["resource"] == "loraadapters"
        and entry["objectRef"].get("subresource") == "status"
        and entry["objectRef"]["namespace"] in mine
    )


@dataclass(frozen=True)
class WriteLoad:
    """What an operator has written, from the audit log."""

    writes: int
    per_second: float


def load_of(home: OperatorNamespaces, *, since: int = 0) -> WriteLoad:
    entries = [
        entry
        for entry in home.cluster.audit(home.user)[since:]
        if entry["verb"] in ("create", "update", "patch", "delete")
        and entry["objectRef"]["resource"] != "leases"
        and entry["responseStatus"]["code"] < 300
    ]
    statuses = [
        datetime.fromisoformat(entry["stageTimestamp"])
        for entry in entries
        if entry["objectRef"].get("subresource") == "status" and entry["objectRef"]["resource"] == "loraadapters"
    ]
    span = (max(statuses) - min(statuses)).total_seconds() if len(statuses) > 1 else 0.0
    return WriteLoad(len(entries), len(statuses) / span if span else 0.0)


def peak_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
