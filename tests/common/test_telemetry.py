"""Metrics on a socket, and log lines for machines and for people."""

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from motet import telemetry
from motet.clock import FakeClock
from motet.errors import SetupError
from motet.health import Health
from motet.telemetry import (
    KEEP_NAME_SECONDS,
    MAX_CONNECTIONS,
    MAX_READERS,
    OTHER_LABEL,
    BoundedLabels,
    Labelled,
    new_registry,
    serving_metrics,
)
from motet.transport.over_grpc import is_healthy, serving
from tests.common.waiting import until

PATIENCE_SECONDS = 10.0


async def ask(path: Path, request: str) -> tuple[list[str], str]:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(request.encode())
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return head.split("\r\n"), body


async def test_get_answers_with_the_figures_and_head_without(tmp_path: Path) -> None:
    registry = new_registry()
    Counter("motet_test", "A test.", registry=registry).inc(3)
    path = tmp_path / "m.sock"
    async with serving_metrics(f"unix:{path}", registry):
        head, body = await ask(path, "GET /metrics HTTP/1.1\r\nhost: motet\r\n\r\n")
        assert head[0] == "HTTP/1.1 200 OK"
        assert f"content-length: {len(body.encode())}" in head
        families = {family.name: family for family in text_string_to_metric_families(body)}
        assert families["motet_test"].samples[0].value == 3
        assert "process_resident_memory_bytes" in families

        head, body = await ask(path, "HEAD /metrics HTTP/1.1\r\nhost: motet\r\n\r\n")
        assert head[0] == "HTTP/1.1 200 OK"
        assert body == ""
    assert not path.exists()


async def test_probes_are_answered_beside_the_figures(tmp_path: Path) -> None:
    path, health = tmp_path / "m.sock", Health()

    async def probe(name: str) -> tuple[str, str]:
        head, body = await ask(path, f"GET /{name} HTTP/1.1\r\nhost: motet\r\n\r\n")
        return head[0].removeprefix("HTTP/1.1 "), body.strip()

    async with serving_metrics(f"unix:{path}", new_registry(), health):
        assert await probe("livez") == await probe("livez?verbose") == ("200 OK", "ok")
        assert await probe("readyz") == ("503 Service Unavailable", "starting")
        health.set_ready(True)
        assert await probe("readyz") == ("200 OK", "ok")
        obstacles = [""]
        health.add_readiness_check(lambda: obstacles[0])
        assert await probe("readyz") == ("200 OK", "ok")
        obstacles[0] = "draining"
        assert await probe("readyz") == ("503 Service Unavailable", "draining")
        health.set_ready(False, "the model is being loaded")
        assert await probe("readyz") == ("503 Service Unavailable", "the model is being loaded")
        stuck = ["", "no step for 60 s"]
        health.add_liveness_check(lambda: stuck[0])
        assert await probe("livez") == ("200 OK", "ok")
        health.add_liveness_check(lambda: stuck[1])
        assert await probe("livez") == ("503 Service Unavailable", "no step for 60 s")
        health.stop()
        health.set_ready(True)
        assert await probe("readyz") == ("503 Service Unavailable", "stopping"), "there is no way back"


async def test_the_health_service_and_the_probe_agree(tmp_path: Path) -> None:
    address, health = f"unix:{tmp_path}/s.sock", Health()
    async with serving(address, ready=False, process=health) as server:
        assert (health.unready_reason(), await is_healthy(address)) == ("starting", False)
        await server.set_ready(True)
        assert (health.unready_reason(), await is_healthy(address)) == ("", True)
        await server.set_ready(False, "draining")
        assert (health.unready_reason(), await is_healthy(address)) == ("draining", False)
        await server.set_ready(True)
    assert health.unready_reason() == "stopping"


async def test_a_scraper_that_disconnects_disturbs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    async with serving_metrics(f"unix:{path}", new_registry()):
        for words in (b"", b"GET /met", b"x" * 200_000):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(words)
            writer.close()
        head, _ = await ask(path, "GET / HTTP/1.0\r\n\r\n")
        assert head[0].endswith("200 OK")


class Slow:
    """Metrics that are not written before somebody says so."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.at_once = self.most_at_once = 0

    def collect(self) -> list[Metric]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.asked.set()
        assert self.go_on.wait(PATIENCE_SECONDS), "the event loop stands still meanwhile"
        self.at_once -= 1
        return []


async def test_metrics_that_take_long_to_write_stop_nothing_else(tmp_path: Path) -> None:
    path, registry, slow = tmp_path / "m.sock", CollectorRegistry(), Slow()
    registry.register(slow)  # type: ignore[arg-type]
    async with serving_metrics(f"unix:{path}", registry), asyncio.timeout(PATIENCE_SECONDS):
        readers = [asyncio.create_task(ask(path, "GET /metrics HTTP/1.1\r\n\r\n")) for _ in range(3)]
        assert await asyncio.to_thread(slow.asked.wait, PATIENCE_SECONDS)
        assert (await ask(path, "GET /livez HTTP/1.1\r\n\r\n"))[0][0] == "HTTP/1.1 200 OK"
        slow.go_on.set()
        assert {head[0] for head, _ in await asyncio.gather(*readers)} == {"HTTP/1.1 200 OK"}
    assert slow.most_at_once == 1


async def test_a_probe_is_answered_before_the_strangers_that_came_behind_it(tmp_path: Path) -> None:
    """The process computes meanwhile, so that all of them come in few turns of its event loop."""
    path = tmp_path / "m.sock"

    def probed() -> bytes:
        with socket.socket(socket.AF_UNIX) as probe, ExitStack() as strangers:
            probe.connect(str(path))
            probe.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
            for _ in range(MAX_CONNECTIONS + 20):
                stranger = strangers.enter_context(socket.socket(socket.AF_UNIX))
                stranger.connect(str(path))
            return probe.recv(100)

    async with serving_metrics(f"unix:{path}", new_registry()), asyncio.timeout(PATIENCE_SECONDS):
        for _ in range(3):
            answer = asyncio.create_task(asyncio.to_thread(probed))
            while not answer.done():
                time.sleep(0.01)  # noqa: ASYNC251 - it computes
                await asyncio.sleep(0)
            assert answer.result().startswith(b"HTTP/1.1 200 OK")


async def test_strangers_take_no_more_than_their_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "ASK_SECONDS", PATIENCE_SECONDS)
    path, registry, slow = tmp_path / "m.sock", CollectorRegistry(), Slow()
    registry.register(slow)  # type: ignore[arg-type]
    async with serving_metrics(f"unix:{path}", registry), asyncio.timeout(PATIENCE_SECONDS):
        silent = [await asyncio.open_unix_connection(path) for _ in range(MAX_CONNECTIONS + 20)]
        ended = [asyncio.create_task(reader.read()) for reader, _ in silent]
        assert (await ask(path, "GET /livez HTTP/1.1\r\n\r\n"))[0][0] == "HTTP/1.1 200 OK"
        done, left = await asyncio.wait(ended, timeout=0.2)
        assert (len(done), len(left)) == (21, MAX_CONNECTIONS - 1)
        readers = [asyncio.create_task(ask(path, "GET /metrics HTTP/1.1\r\n\r\n")) for _ in range(MAX_READERS + 3)]
        await until(lambda: sum(one.done() for one in readers) == 3, PATIENCE_SECONDS)
        assert (await ask(path, "GET /livez HTTP/1.1\r\n\r\n"))[0][0] == "HTTP/1.1 200 OK"
        slow.go_on.set()
        answers = [head[0] for head, _ in await asyncio.gather(*readers)]
        assert sorted(answers) == ["HTTP/1.1 200 OK"] * MAX_READERS + ["HTTP/1.1 503 Service Unavailable"] * 3
        for _, writer in silent:
            writer.close()
        await asyncio.gather(*left, return_exceptions=True)


async def test_a_scraper_that_does_not_read_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "READ_SECONDS", 0.05)
    path, registry = tmp_path / "m.sock", CollectorRegistry()
    Counter("motet_test", "long " * 1_000_000, registry=registry)
    async with serving_metrics(f"unix:{path}", registry):
        with socket.socket(socket.AF_UNIX) as reader:
            reader.connect(str(path))
            reader.send(b"GET /metrics HTTP/1.1\r\n\r\n")
            ended = select.poll()
            ended.register(reader, select.POLLHUP)
            await until(lambda: ended.poll(0), PATIENCE_SECONDS)


async def test_a_dead_processes_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    path.touch()
    async with serving_metrics(f"unix:{path}", new_registry()):
        head, _ = await ask(path, "GET / HTTP/1.0\r\n\r\n")
        assert head[0].endswith("200 OK")


async def test_without_an_address_nothing_is_served() -> None:
    async with serving_metrics("", new_registry()):
        pass


@pytest.mark.parametrize("address", ["unix:/nowhere/m.sock", "127.0.0.1:port", "127.0.0.1:70000000"])
async def test_an_address_that_cannot_be_served_is_named(address: str) -> None:
    with pytest.raises(SetupError, match="MOTET_METRICS_ADDRESS"):
        async with serving_metrics(address, new_registry()):
            pass


SPEAK = """
import logging, sys, structlog
from motet.settings import ProcessSettings
from motet.telemetry import configure_logging

configure_logging("tester", ProcessSettings(log_level=sys.argv[1], log_format=sys.argv[2]))
structlog.get_logger().info("hello", answer=42)
structlog.get_logger().warning("careful")
logging.getLogger("library").warning("from a library")
logging.getLogger("library").info("chatter")
"""


def spoken(level: str, form: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SPEAK, level, form], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


FAIL = """
import sys
import structlog
from motet.settings import ProcessSettings
from motet.telemetry import configure_logging

configure_logging("tester", ProcessSettings(log_format=sys.argv[1]))

def answer(words):
    said = words.upper()
    raise RuntimeError("no room")

try:
    answer("xylo" + "phone")
except RuntimeError:
    structlog.get_logger().exception("an answer broke off")
"""


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_logged_traceback_has_lines_but_no_values_of_variables(form: str) -> None:
    told = subprocess.run([sys.executable, "-c", FAIL, form], capture_output=True, text=True, check=True).stderr
    assert "RuntimeError: no room" in told
    assert "in answer" in told
    assert "xylophone" not in told.lower()


def test_the_json_format_writes_one_object_per_line() -> None:
    hello, careful, library = map(json.loads, spoken("info", "json"))
    assert (hello["event"], hello["answer"], hello["service"], hello["level"]) == ("hello", 42, "tester", "info")
    assert careful["level"] == "warning"
    assert library["event"] == "from a library"


def test_the_level_silences_what_is_below_it() -> None:
    assert len(spoken("warning", "json")) == 2


def test_the_console_format_writes_plain_lines() -> None:
    lines = spoken("info", "console")
    assert "hello" in lines[0]
    assert "\x1b" not in lines[0], "no colours where nobody looks"


def test_with_a_full_disk_lines_are_lost_and_the_process_continues() -> None:
    with Path("/dev/full").open("w") as full:
        buffered = os.environ | {"PYTHONUNBUFFERED": ""}
        done = subprocess.run([sys.executable, "-c", SPEAK, "info", "json"], stderr=full, env=buffered, check=False)
    assert done.returncode == 0


class Named:
    """A counter with a label that users choose; the label may have two values."""

    def __init__(self, most: int = 2) -> None:
        self.registry, self.clock = CollectorRegistry(), FakeClock()
        self.counter = Labelled(Counter("motet_test", "A test.", ("who", "code"), registry=self.registry))
        self.names = BoundedLabels(most, ("who",), (self.counter,), clock=self.clock)

    def use(self, name: str) -> str:
        (label,) = self.names.of(name)
        self.counter.labels(label, "200").inc()
        return label

    def shown(self) -> set[str]:
        families = text_string_to_metric_families(generate_latest(self.registry).decode())
        return {sample.labels["who"] for family in families for sample in family.samples}


def test_a_label_has_only_allowed_names() -> None:
    named = Named(most=0)
    assert {named.use(name) for name in "abc"} == {""}
    assert named.shown() == {""}


def test_an_unused_name_is_removed_with_its_series() -> None:
    named = Named()
    named.use("a")
    named.use("b")
    named.clock.advance(KEEP_NAME_SECONDS)
    assert named.use("a") == "a"
    assert named.use("c") == "c"
    assert named.shown() == {"a", "c"}


def test_a_removed_name_that_comes_back_is_counted_from_the_beginning() -> None:
    named = Named(most=1)
    for name in ("a", "a", "b", "a"):
        named.use(name)
        named.clock.advance(KEEP_NAME_SECONDS)
    assert named.registry.get_sample_value("motet_test_total", {"who": "a", "code": "200"}) == 1


def test_names_in_use_do_not_push_each_other_out() -> None:
    named = Named()
    shown = {named.use(f"n{number}") for number in range(100)}
    assert shown == {"n0", "n1", OTHER_LABEL}
    assert named.shown() == shown
