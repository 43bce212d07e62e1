"""Measures the operator on a real API server: how fast adapters get their status, and what the operator costs.

    sync_1000_s        1,000 adapters in 50 namespaces, from the start of the process to the last status
    reconciles_per_s   statuses per second between the first and the last one
    idle_writes        writes in the half minute afterwards, without renewals of the Lease; from the audit log
    operator_mib       peak resident memory
    takeover_s         from the leader's SIGKILL, and from its SIGTERM, to the next leader's first write
    apply_to_served_s  from an adapter's manifest to its first token, with the whole product; its files are on a volume

The control plane and this benchmark share the machine with the operator. The baseline is an operator as kopf's
documentation writes one: a handler for creation that patches the status. The two alternate on the same objects, and are
measured by the clock (which includes the API server's time) and by their own CPU time. Run it with
`python -m benchmarks.operator`.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from benchmarks.harness import Pairs, Result, alternate, arguments, cpu_seconds, measuring_other_load, report, skip
from motet_operator.cluster.api import Api
from motet_operator.cluster.kinds import ADAPTERS
from testbed.cluster.cluster import Cluster
from testbed.cluster.control_plane import NEEDED, control_plane
from testbed.cluster.many_adapters import (
    REAL_TIME,
    admin_api,
    last_status,
    load_of,
    peak_mib,
    populate,
    wait_for_status,
)
from testbed.cluster.network import CannotIsolate, network
from testbed.cluster.nodes import addons, node
from testbed.cluster.operators import OperatorNamespaces, OperatorProcess, site
from testbed.cluster.product import bring_demo, installed, served_after
from testbed.cluster.programs import Program
from tools.kube.binaries import find, uses_existing_cluster

SYNC_TARGET_S = 20.0
RATE_TARGET = 100.0
MEMORY_TARGET_MIB = 256.0
KILLED_TARGET_S, POLITE_TARGET_S = 20.0, 2.0
SERVED_TARGET_S = 3.0
IDLE_S = 30.0
BASELINE = """
import asyncio, os, sys
import kopf

@kopf.on.login()
def login(**kwargs):
    return kopf.login_with_kubeconfig(**kwargs)

@kopf.on.startup()
def configure(settings, **_):
    settings.posting.enabled = False
    settings.networking.connect_timeout = 5

@kopf.on.create("motet.dev", "v1alpha1", "loraadapters")
@kopf.on.resume("motet.dev", "v1alpha1", "loraadapters")
async def created(patch, body, **_):
    patch.status["observedGeneration"] = body.metadata["generation"]
    patch.status["conditions"] = [dict(
        type="Ready", status="Unknown", reason="WaitingForRunner", message="no runner is ready",
        lastTransitionTime="2026-01-01T00:00:00Z", observedGeneration=body.metadata["generation"],
    )]

asyncio.run(kopf.operator(clusterwide=True, standalone=True))
"""


async def sync(api: Api, home: OperatorNamespaces, adapters: int, namespaces: int, within_s: float) -> list[Result]:
    began = time.monotonic()
    tenants = await populate(api, home, adapters, namespaces, "many")
    print(f"{adapters} adapters created in {time.monotonic() - began:.1f} s. Starting the operator.")
    operator = OperatorProcess(home, "cold", env={**REAL_TIME, "MOTET_CLUSTER_RESYNC_SECONDS": "10"})
    began_at = datetime.now(UTC)
    operator.program.start(wait=False)
    try:
        plane = psutil.Process().children(recursive=True)
        cpu = {one.pid: sum(one.cpu_times()[:2]) for one in plane}
        with measuring_other_load(plane) as foreign:
            await wait_for_status(api, tenants, adapters, operator.program.assert_alive, within_s)
        shares = ", ".join(f"{one.name()} {sum(one.cpu_times()[:2]) - cpu[one.pid]:.1f} s" for one in plane)
        took = (last_status(home.cluster, tenants) - began_at).total_seconds()
        await asyncio.sleep(3)
        work = load_of(home)
        before = len(home.cluster.audit(home.user))
        await asyncio.sleep(IDLE_S)
        idle = load_of(home, since=before)
        peak = peak_mib(operator.program.pid)
    finally:
        operator.program.stop()
    print(
        f"{adapters} adapters in {namespaces} namespaces: last status after {took:.1f} s, {work.writes} writes, "
        f"{work.per_second:.0f} statuses per second; {idle.writes} writes in {IDLE_S:.0f} s afterwards; "
        f"peak memory {peak:.0f} MiB; CPU: {shares}; other processes took {foreign.share:.0%} of the machine"
    )
    return [
        Result(f"sync_{adapters}_s", took, "s", f"<= {SYNC_TARGET_S:.0f} s", took <= SYNC_TARGET_S),
        Result("reconciles_per_s", work.per_second, "1/s", f">= {RATE_TARGET:.0f}", work.per_second >= RATE_TARGET),
        Result("idle_writes", idle.writes, "writes", "0", idle.writes == 0),
        Result("operator_mib", peak, "MiB", f"<= {MEMORY_TARGET_MIB:.0f} MiB", peak <= MEMORY_TARGET_MIB),
    ]


async def takeover(api: Api, home: OperatorNamespaces, *, polite: bool) -> float:
    """The time from the leader's end to the next leader's first write."""
    tenant = home.tenant(f"takeover-{polite}".lower())
    name = "polite" if polite else "killed"
    one = OperatorProcess(home, f"{name}-one", lease=True, port=9091, env=REAL_TIME)
    other = OperatorProcess(home, f"{name}-other", lease=True, port=9092, env=REAL_TIME)
    with one, other:
        home.cluster.wait_for(lambda: one.metric("motet_operator_leader") + other.metric("motet_operator_leader") == 1)
        leader = one if one.metric("motet_operator_leader") else other
        await api.apply(ADAPTERS, home.adapter("before", tenant, "nowhere"), manager="benchmark")
        await wait_for_status(api, [tenant], 1, lambda: None, 20)
        began = time.monotonic()
        if polite:
            psutil.Process(leader.program.pid).terminate()
        else:
            leader.program.kill()
        await api.apply(ADAPTERS, home.adapter("after", tenant, "nowhere"), manager="benchmark")
        await wait_for_status(api, [tenant], 2, lambda: None, 40)
        return time.monotonic() - began


@dataclass(frozen=True)
class Comparison:
    """How long the statuses of new adapters take, with an operator as in kopf's documentation (A) and with ours (B)."""

    wall: Pairs
    cpu: Pairs
    """The operators' own CPU time, from the start of the process until all adapters had their status."""


async def compare_with_kopf(api: Api, home: OperatorNamespaces, adapters: int, pairs: int) -> Comparison:
    script = home.folder / "usual.py"
    script.write_text(BASELINE)
    number = 0
    cpu_of_theirs, cpu_of_ours = list[float](), list[float]()

    async def measure(start: Callable[[], Program], cpu_of_side: list[float]) -> float:
        nonlocal number
        number += 1
        tenants = await populate(api, home, adapters, 10, f"pair{number}")
        program = start()
        began_at = datetime.now(UTC)
        program.start(wait=False)
        try:
            await wait_for_status(api, tenants, adapters, program.assert_alive, 120)
            cpu_of_side.append(cpu_seconds(psutil.Process(program.pid)))
            return (last_status(home.cluster, tenants) - began_at).total_seconds()
        finally:
            program.stop()
            for tenant in tenants:
                items, _ = await api.list(ADAPTERS, tenant)
                for it in items:
                    await api.delete(ADAPTERS, tenant, it["metadata"]["name"], uid=it["metadata"]["uid"])

    def usual() -> Program:
        assert home.cluster.network is not None
        env = {**os.environ, "KUBECONFIG": str(home.cluster.kubeconfig)}
        command = [sys.executable, str(script)]
        return Program(command, home.folder / "usual.log", home.cluster.network, lambda: True, env=env)

    wall = await alternate(
        lambda: measure(usual, cpu_of_theirs),
        lambda: measure(lambda: OperatorProcess(home, "pair", env=REAL_TIME).program, cpu_of_ours),
        pairs=pairs,
        attempts=pairs,  # no pair is discarded, so all figures are of the same pairs
    )
    return Comparison(wall, wall.beside(cpu_of_theirs, cpu_of_ours))


async def measure(cluster: Cluster, folder: Path, given: argparse.Namespace) -> list[Result]:
    results = []
    if given.only in (None, "served"):  # the first: it needs an empty cluster, and removes all that it creates
        results += served(cluster, folder)
    async with admin_api(cluster) as api:
        if given.only in (None, "sync"):
            with site(cluster, folder) as home:
                results += await sync(api, home, given.adapters, given.namespaces, within_s=given.within)
        if given.only in (None, "takeover"):
            results += await takeovers(api, cluster, folder)
        if given.only in (None, "baseline"):
            results += await baseline(api, cluster, folder, given)
    return results


async def takeovers(api: Api, cluster: Cluster, folder: Path) -> list[Result]:
    results = []
    with site(cluster, folder) as home:
        for polite, target in ((False, KILLED_TARGET_S), (True, POLITE_TARGET_S)):
            seconds = await takeover(api, home, polite=polite)
            name = "takeover_polite_s" if polite else "takeover_s"
            results.append(Result(name, seconds, "s", f"<= {target:.0f} s", seconds <= target))
    return results


async def baseline(api: Api, cluster: Cluster, folder: Path, given: argparse.Namespace) -> list[Result]:
    with site(cluster, folder) as home:
        both = await compare_with_kopf(api, home, given.pair_adapters, given.pairs)
    print(f"{given.pair_adapters} new adapters, an operator as in kopf's documentation against ours, the best figures:")
    for what, pairs in (("by the clock", both.wall), ("of CPU time", both.cpu)):
        print(f"  {min(pairs.a):.1f} s against {min(pairs.b):.1f} s {what}; {pairs}")
    usual = "an operator as kopf's documentation writes one"
    return [
        Result("usual_way_ratio", both.wall.ratio, "x", baseline=usual, pairs=both.wall),
        Result("usual_way_cpu_ratio", both.cpu.ratio, "x", baseline=usual, pairs=both.cpu),
    ]


def served(cluster: Cluster, folder: Path) -> list[Result]:
    with addons(cluster), node(cluster, "node-1", 1), installed(cluster, folder) as product:
        bring_demo(product, folder)
        took = [served_after(product, f"tales-{index}") for index in range(5)]
    print(f"from the manifest to the first token: {', '.join(f'{seconds:.2f} s' for seconds in took)}")
    median = statistics.median(took)
    return [Result("apply_to_served_s", median, "s", f"<= {SERVED_TARGET_S:.0f} s", median <= SERVED_TARGET_S)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--adapters", type=int, default=1000, help="adapters to create")
    parser.add_argument("--namespaces", type=int, default=50, help="namespaces of these adapters")
    parser.add_argument("--within", type=float, default=180.0, help="seconds after which the benchmark fails")
    parser.add_argument("--pairs", type=int, default=2, help="pairs of our operator and the baseline")
    parser.add_argument("--pair-adapters", type=int, default=300, help="adapters to create for each side of a pair")
    parser.add_argument("--only", choices=("served", "sync", "takeover", "baseline"), help="measure only this part")
    given = parser.parse_args()
    if missing := [tool for tool in NEEDED if find(tool) is None]:
        skip(f"{', '.join(missing)} must be built first (make kube)")
    if uses_existing_cluster():
        skip("USE_EXISTING_CLUSTER is set, and this benchmark measures only its own cluster")
    try:
        results = in_own_cluster(given)
    except CannotIsolate as error:
        skip(str(error))
    report("operator", results, as_json=given.json)


def in_own_cluster(given: argparse.Namespace) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="motet-benchmark-") as name, network() as isolated:
        folder = Path(name)
        with control_plane(folder, isolated) as cluster, cluster.inside():
            return asyncio.run(measure(cluster, folder, given))


if __name__ == "__main__":
    main()
