"""Two schedulers and one Lease of a real API server."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import yaml

from motet.errors import SetupError
from motet.kube import KubeApi, StatusError, Unreachable
from motet.lease import TERMS_AT_A_TIME, Election
from motet.settings import LeaseSettings
from motet.transport.over_grpc import is_healthy
from motet_simulator.fake_engine import FakeEngine, tokens_of
from testbed.cluster.cluster import Cluster
from tests.common.waiting import PATIENCE_S
from tests.support.fake_gateway import fake_gateway
from tests.support.in_process_runner import in_process_runner, short_folder
from tests.support.in_process_services import FakeOperator, until
from tests.support.surroundings import REAL

LEASE = "motet-scheduler"
ACCOUNT = "scheduler"
QUICK = {"seconds": 5.0, "renew_seconds": 3.5, "retry_seconds": 0.5}


@pytest.fixture
def account(cluster: Cluster, namespace: str) -> Path:
    """A kubeconfig of a ServiceAccount that may do what an election needs, and nothing else."""
    metadata = {"name": ACCOUNT, "namespace": namespace}
    group = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": metadata,
            "rules": [
                # RBAC cannot limit `create` to a name.
                {**group, "verbs": ["create"]},
                {**group, "verbs": ["get", "update"], "resourceNames": [LEASE]},
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}],
        },
    )
    return cluster.kubeconfig_for(ACCOUNT, namespace)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def settings(namespace: str, **more: float) -> LeaseSettings:
    return LeaseSettings(name=LEASE, namespace=namespace, **more)


def lease_in(cluster: Cluster, namespace: str) -> dict:
    return cluster.get("lease", LEASE, f"--namespace={namespace}")


async def test_a_lease_names_the_leader_while_it_leads_and_nobody_after(
    cluster: Cluster, namespace: str, account: Path
) -> None:
    async with KubeApi(account, "the test") as api:
        for term in (1, 2):
            async with Election(api, settings(namespace), surroundings=REAL, address="10.1.2.3:7101") as election:
                lease = lease_in(cluster, namespace)
                assert election.term == term
                assert lease["metadata"]["annotations"] == {
                    "motet.dev/term": str(term + TERMS_AT_A_TIME - 1),
                    "motet.dev/address": "10.1.2.3:7101",
                }
                spec = lease["spec"]
                assert spec["holderIdentity"] == election.identity
                assert (spec["leaseDurationSeconds"], spec["leaseTransitions"]) == (15, term - 1)
            assert not lease_in(cluster, namespace)["spec"].get("holderIdentity")


async def test_without_permission_for_the_lease_the_error_names_it(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("create", "serviceaccount", "nobody", f"--namespace={namespace}")
    async with KubeApi(cluster.kubeconfig_for("nobody", namespace), "the test") as api:
        with pytest.raises(SetupError, match=r"cannot get resource .* Grant .* get, create and update on leases"):
            async with Election(api, settings(namespace), surroundings=REAL):
                pass


async def test_a_token_that_was_refused_is_read_again(cluster: Cluster, namespace: str, account: Path) -> None:
    good = account.read_text()
    token = yaml.safe_load(good)["users"][0]["user"]["token"]
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{LEASE}"
    account.write_text(good.replace(token, "stale"))
    async with KubeApi(account, "the test") as api:
        with pytest.raises(Unreachable, match="401"):
            await api.get(path, seconds=5)
        account.write_text(good)
        with pytest.raises(StatusError, match="not found"):
            await api.get(path, seconds=5)


@pytest.mark.own_cluster
async def test_an_api_server_that_restarts_costs_a_leader_nothing(
    cluster: Cluster, namespace: str, account: Path
) -> None:
    assert cluster.apiserver is not None
    cluster.let_namespaces_go()
    losses: list[str] = []
    patient = settings(namespace, seconds=60, renew_seconds=40)  # this test blocks its own event loop
    async with (
        KubeApi(account, "the test") as api,
        Election(api, patient, surroundings=REAL, lost=losses.append) as election,
    ):
        cluster.apiserver.restart()
        written: list[str] = []
        election.raise_term_above(
            7, lambda: written.append(lease_in(cluster, namespace)["metadata"]["annotations"]["motet.dev/term"])
        )
        await until(lambda: written)
        assert election.term == 8
        assert int(written[0]) >= 8, "it is in the Lease before other processes learn it"
        assert election.leads
        assert losses == []


class SchedulerProcess:
    """`python -m motet_scheduler` as a pod runs it."""

    def __init__(self, folder: Path, name: str, namespace: str, kubeconfig: Path, lease: dict[str, float]) -> None:
        self.name = name
        self.address = f"unix:{folder}/{name}.sock"
        self._log = folder / f"{name}.log"
        self._environment = os.environ | {
            "MOTET_DATA_DIR": str(folder / name),
            "MOTET_SCHEDULER_ADDRESS": self.address,
            "MOTET_SUPERVISOR_ADDRESS": f"unix:{folder}/supervisor.sock",
            "MOTET_LEASE_NAME": LEASE,
            "MOTET_LEASE_NAMESPACE": namespace,
            "MOTET_LEASE_KUBECONFIG": str(kubeconfig),
            "POD_NAME": name,
            **{f"MOTET_LEASE_{key}".upper(): str(value) for key, value in lease.items()},
        }
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "motet_scheduler", env=self._environment, stderr=log
            )
        while not await is_healthy(self.address):
            assert self.process.returncode is None, self._log.read_text()
            await asyncio.sleep(0.05)

    async def end(self, signum: signal.Signals) -> int:
        if self.process.returncode is None:
            self.process.send_signal(signum)
        return await self.process.wait()

    def said(self) -> str:
        return self._log.read_text()


@asynccontextmanager
async def replicas(
    folder: Path, namespace: str, kubeconfig: Path, lease: dict[str, float]
) -> AsyncIterator[list[SchedulerProcess]]:
    """Two schedulers; the first one leads."""
    both = [SchedulerProcess(folder, name, namespace, kubeconfig, lease) for name in ("a", "b")]
    async with AsyncExitStack() as stack:
        for one in both:
            stack.push_async_callback(one.end, signal.SIGKILL)
            await one.start()
        yield both


@pytest.mark.parametrize(
    ("signum", "lease", "within", "tokens"),  # a hundred tokens a second: what runs is longer than what it outlives
    [
        pytest.param(signal.SIGTERM, {}, 2.0, 500, id="stopped politely, at the defaults"),
        pytest.param(signal.SIGKILL, QUICK, QUICK["seconds"] + QUICK["retry_seconds"], 1000, id="killed"),
    ],
)
async def test_when_the_leader_goes_the_other_acts_and_streams_resume(
    *,
    cluster: Cluster,
    namespace: str,
    account: Path,
    folder: Path,
    signum: signal.Signals,
    lease: dict[str, float],
    within: float,
    tokens: int,
    record_property,
) -> None:
    began = time.monotonic()
    async with replicas(folder, namespace, account, lease) as (leader, standby), AsyncExitStack() as clients:
        starting = time.monotonic() - began
        operator = FakeOperator(standby.address)
        operator.state()
        operating = asyncio.create_task(operator.link.run())
        clients.callback(operating.cancel)
        # They know only the standby, which sends them to the leader.
        runner = in_process_runner(
            folder,
            instance="r0",
            scheduler=standby.address,
            engine=lambda: FakeEngine(step_seconds=0.01),
            time_scale=1.0,
        )
        await clients.enter_async_context(runner)
        gateway = await clients.enter_async_context(fake_gateway("g0", scheduler=standby.address))
        running = gateway.start("running", prompt=(5,), max_tokens=tokens)
        await until(lambda: gateway.asked["running"].tokens)
        assert gateway.term == 1
        gone = time.monotonic()
        status = await leader.end(signum)
        assert status == (0 if signum == signal.SIGTERM else -signum)
        assert await gateway.ask("new", prompt=(9,), max_tokens=2) == tokens_of((9,), 7, 2)
        seconds = gateway.asked["new"].placed_at - gone
        record_property("seconds_to_place", seconds)
        print(f"placed by the other {seconds:.2f} s after {signum.name}")
        assert seconds <= within + starting, standby.said()  # a placement is much less than two processes' start
        # One that releases the Lease gives back the terms that it has reserved and not used.
        assert gateway.term == (2 if signum == signal.SIGTERM else 1 + TERMS_AT_A_TIME)
        assert lease_in(cluster, namespace)["spec"]["holderIdentity"].startswith("b-")
        assert await running == tokens_of((5,), 7, tokens)
        assert len(gateway.asked["running"].placements) == 1, "what ran was not touched"
        # The killed one returns as the standby.
        term = gateway.term
        await leader.start()
        assert gateway.term == term


async def test_a_frozen_leader_ends_when_it_continues_and_the_other_leads(
    cluster: Cluster, namespace: str, account: Path, folder: Path
) -> None:
    async with replicas(folder, namespace, account, QUICK) as (leader, standby):
        leader.process.send_signal(signal.SIGSTOP)
        await until(lambda: "leadership_acquired" in standby.said())
        leader.process.send_signal(signal.SIGCONT)
        assert await asyncio.wait_for(leader.process.wait(), PATIENCE_S) == 1
        assert "leadership_lost" in leader.said()
        assert lease_in(cluster, namespace)["metadata"]["annotations"]["motet.dev/term"] == str(2 * TERMS_AT_A_TIME)
