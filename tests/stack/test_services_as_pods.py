"""The five services as pods run them: TCP, mutual TLS by role, probes over HTTP, and a graceful end on SIGTERM."""

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from motet.transport.over_grpc import is_healthy
from tests.stack.pods import GRACE_S, SERVICES, ServicesAsPods, all_end
from tests.support.authority import Authority


@pytest.fixture
def pods(tmp_path: Path) -> ServicesAsPods:
    return ServicesAsPods(tmp_path)


async def test_services_use_tls_through_a_rotation_and_end_gracefully(pods: ServicesAsPods) -> None:
    with ExitStack() as stack:
        for service in SERVICES:
            stack.enter_context(pods.running(service))
        async with pods.operator():
            for service in SERVICES:
                await pods.until_ready(service)
                assert pods.probe(service, "livez") == (200, "ok")
            assert await pods.ask("demo")
            assert await pods.ask("pirate")
            assert not await is_healthy(pods.address("scheduler"), "scheduler"), "plain text is refused"

            # While the processes run, every TLS certificate is replaced by one of another authority.
            pods.authority = Authority("next")
            for role in (*SERVICES, "operator"):
                pods.issue(role)
            scheduler = pods.processes["scheduler"]
            scheduler.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(scheduler.wait, GRACE_S) == 0
            stack.enter_context(pods.running("scheduler"))
            await pods.until_ready("scheduler")
            assert await pods.ask("pirate"), "new handshakes use the new certificates"

            # The runner finishes a running answer.
            runner = pods.processes["runner"]
            received: list[str] = []
            async for text in pods.stream("demo", tokens=200):
                if not received:
                    runner.send_signal(signal.SIGTERM)
                received.append(text)
            assert len(received) > 1
            assert await asyncio.to_thread(runner.wait, 20 + GRACE_S) == 0
            assert "drained" in pods.log("runner").read_text()
        for service in SERVICES:
            if service != "runner":
                pods.processes[service].send_signal(signal.SIGTERM)
        others = [pods.processes[name] for name in SERVICES if name != "runner"]
        assert await asyncio.to_thread(all_end, others) == [0] * len(others)
        for service in SERVICES:
            lines = pods.log(service).read_text().splitlines()
            assert [line for line in lines if "Traceback" in line] == [], service
