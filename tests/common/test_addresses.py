"""Addresses of both families: how they are written, and that processes reach each other over IPv6."""

import asyncio
import socket

import pytest
from prometheus_client import CollectorRegistry

from motet import addresses
from motet.addresses import bound_socket, bracketed, host_and_port, http_url
from motet.rpc import Link
from motet.settings import Addresses, ProcessSettings
from motet.telemetry import serving_metrics
from motet.transport.over_grpc import GrpcNetwork, is_healthy, serving
from tests.common.echo import TALK, Echo
from tests.common.waiting import until


def free_port(host: str) -> int:
    with bound_socket(host, 0) as found:
        return int(found.getsockname()[1])


@pytest.mark.parametrize(
    ("written", "understood"),
    [
        ("fd00:10:244::5:7101", "[fd00:10:244::5]:7101"),
        ("::1:7101", "[::1]:7101"),
        (":::7101", "[::]:7101"),
        ("fe80::1%eth0:7101", "[fe80::1%eth0]:7101"),
        ("[fd00::5]:7101", "[fd00::5]:7101"),
        ("10.244.0.5:7101", "10.244.0.5:7101"),
        ("motet-scheduler.motet-system.svc:7101", "motet-scheduler.motet-system.svc:7101"),
        ("unix:/run/s.sock", "unix:/run/s.sock"),
        ("dns:///motet-scheduler:7101", "dns:///motet-scheduler:7101"),
        ("localhost", "localhost"),
        ("", ""),
    ],
)
def test_an_ipv6_host_gets_brackets_and_all_else_stays(written: str, understood: str) -> None:
    assert bracketed(written) == understood
    assert bracketed(understood) == understood


def test_settings_take_the_address_of_a_pod_as_kubernetes_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SCHEDULER_ADDRESS", "PREDICTOR_ADDRESS", "SUPERVISOR_ADDRESS", "METRICS_ADDRESS"):
        monkeypatch.setenv(f"MOTET_{name}", "fd00::5:7101")
    found = Addresses()
    assert {found.scheduler_address, found.predictor_address, found.supervisor_address} == {"[fd00::5]:7101"}
    assert ProcessSettings().metrics_address == "[fd00::5]:7101"


def test_urls_name_an_address_that_this_machine_reaches() -> None:
    assert http_url("::", 8000) == http_url("0.0.0.0", 8000) == http_url("", 8000) == "http://127.0.0.1:8000"
    assert http_url("::1", 8000) == "http://[::1]:8000"
    assert http_url("localhost", 8000) == "http://localhost:8000"


@pytest.mark.parametrize("reached", ["127.0.0.1", "::1"])
def test_every_address_is_that_of_both_families(reached: str) -> None:
    with bound_socket("::", 0) as bound:
        bound.listen()
        with socket.create_connection((reached, bound.getsockname()[1]), timeout=5):
            pass


def test_every_address_is_that_of_ipv4_on_a_machine_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses.socket, "has_dualstack_ipv6", lambda: False)
    with bound_socket("::", 0) as bound:
        assert bound.getsockname()[0] == "0.0.0.0"


def test_an_address_in_use_is_refused_and_its_socket_closed() -> None:
    with bound_socket("::1", 0) as bound:
        bound.listen()
        with pytest.raises(OSError, match="in use"):
            bound_socket("::1", bound.getsockname()[1])


async def test_a_link_leads_to_the_address_of_an_ipv6_pod() -> None:
    address = Addresses(scheduler_address=f"::1:{free_port('::1')}").scheduler_address
    received: list[bytes] = []
    link: Link[bytes, bytes] = Link(
        "test", address, TALK, network=GrpcNetwork(), greet=lambda: [b"hello"], receive=received.append
    )
    async with serving(address, Echo().add):
        assert await is_healthy(address)
        running = asyncio.create_task(link.run())
        await until(lambda: received)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("reached", ["127.0.0.1", "::1"])
async def test_a_server_on_every_address_answers_in_both_families(reached: str) -> None:
    async with serving("[::]:0") as server:
        assert await is_healthy(host_and_port(reached, server.port))


@pytest.mark.parametrize("reached", ["127.0.0.1", "::1"])
async def test_metrics_on_every_address_answer_in_both_families(reached: str) -> None:
    port = free_port("::")
    async with serving_metrics(f"[::]:{port}", CollectorRegistry()):
        reader, writer = await asyncio.open_connection(reached, port)
        writer.write(b"GET /livez HTTP/1.1\r\nhost: motet\r\n\r\n")
        assert b"HTTP/1.1 " in await reader.readline()
        writer.close()
