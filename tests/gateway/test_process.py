"""The gateway as a process: it starts, says why it cannot, and stops."""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx2
import psutil
import pytest

from motet import keys
from motet.keys import ApiKey, KeyScope
from motet.store import keys as stored
from motet.store import migrate, open_store
from testbed.fake_services import FakeServices
from testbed.ports import free_port
from tests.common.waiting import PATIENCE_S


@asynccontextmanager
async def process(folder: Path, port: int, cluster: FakeServices | None = None, **environment: str):
    addresses = {}
    if cluster is not None:
        addresses = {
            "MOTET_SCHEDULER_ADDRESS": cluster.scheduler.address,
            "MOTET_PREDICTOR_ADDRESS": cluster.predictor.address,
        }
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "motet_gateway",
        env=os.environ | {"MOTET_DATA_DIR": str(folder), "MOTET_GATEWAY_PORT": str(port)} | addresses | environment,
        stderr=PIPE,
        stdout=PIPE,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def answers(http: httpx2.AsyncClient, path: str, status: int = 200) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                if (await http.get(path)).status_code == status:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.05)


async def end(started: Process) -> tuple[int, str]:
    async with asyncio.timeout(PATIENCE_S):
        _, output = await started.communicate()
    assert started.returncode is not None
    return started.returncode, output.decode()


async def test_a_stream_is_served_to_its_end_after_sigterm(tmp_path: Path, cluster: FakeServices) -> None:
    port = free_port()
    cluster.runners[0].step_seconds = 0.02
    async with process(tmp_path, port, cluster) as started:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http:
            await answers(http, "/health")
            body = {"model": "legal", "prompt": "Hi", "max_tokens": 30, "ignore_eos": True, "stream": True}
            lines = []
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if not lines:
                        started.send_signal(signal.SIGTERM)
                    lines.append(line)
        assert "data: [DONE]" in lines
        assert any('"finish_reason":"length"' in line for line in lines)
        status, output = await end(started)
        assert status == 0, output
        assert "Traceback" not in output


async def test_a_port_in_use_is_named_with_the_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with process(tmp_path, port) as started:
            status, output = await end(started)
    assert status == 2
    assert f"port {port}" in output
    assert "--port" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(("name", "value"), [("MOTET_GATEWAY_HOLD_SECONDS", "soon"), ("MOTET_LOG_LEVEL", "loud")])
async def test_a_wrong_setting_is_named(tmp_path: Path, name: str, value: str) -> None:
    async with process(tmp_path, 0, **{name: value}) as started:
        status, output = await end(started)
    assert status == 2
    assert name in output
    assert value in output
    assert "Traceback" not in output


async def test_prompts_and_answers_never_reach_the_log(tmp_path: Path, cluster: FakeServices) -> None:
    port = free_port()
    secret = "xylophone"
    async with process(tmp_path, port, cluster, MOTET_LOG_LEVEL="debug") as started:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http:
            await answers(http, "/health")
            for body in ({"prompt": secret}, {"prompt": secret, "stream": True}, {"prompt": [secret, 7]}):
                await http.post("/v1/completions", json={"model": "legal"} | body)
        started.send_signal(signal.SIGTERM)
        status, output = await end(started)
    assert status == 0
    assert "request_answered" in output
    assert secret not in output


async def test_a_chat_is_rendered_and_leaves_no_process_behind(tmp_path: Path, cluster: FakeServices) -> None:
    port = free_port()
    async with process(tmp_path, port, cluster) as started:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http:
            await answers(http, "/health")
            body = {"model": "legal", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
        children = psutil.Process(started.pid).children()
        assert children
        started.kill()
        await started.communicate()
    psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


async def test_without_keys_the_gateway_does_not_listen_on_all_addresses(tmp_path: Path) -> None:
    async with process(tmp_path, 0, MOTET_GATEWAY_HOST="0.0.0.0") as started:
        status, output = await end(started)
    assert status == 2
    assert "motet key create --tenant default" in output
    assert "Traceback" not in output


async def test_a_running_gateway_follows_changes_of_keys_in_the_database(tmp_path: Path, cluster: FakeServices) -> None:
    port, url = free_port(), f"sqlite+aiosqlite:///{tmp_path}/motet.db"
    await migrate(url)
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 4}
    made = keys.new_key()
    async with (
        process(tmp_path, port, cluster, MOTET_GATEWAY_KEYS_READ_SECONDS="0.1", MOTET_LOG_LEVEL="debug") as started,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http,
        open_store(url) as store,
    ):
        await answers(http, "/health")
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        now = datetime.now(UTC)
        scopes = frozenset({KeyScope.USER})
        await stored.add(store, ApiKey(id=made.id, tenant="acme", scopes=scopes, hash=made.hash, created=now))
        await answers(http, "/v1/models", 401)
        http.headers["authorization"] = f"Bearer {made}"
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        await stored.revoke(store, made.id, tenant="acme", at=datetime.now(UTC))
        await answers(http, "/v1/models", 401)
        started.send_signal(signal.SIGTERM)
        status, output = await end(started)
    assert status == 0, output
    assert "Traceback" not in output
    assert made.secret not in output
    assert f'"key": "{made.id}"' in output
    assert '"tenant": "acme"' in output


async def test_the_gateway_is_ready_only_once_it_has_read_required_keys(tmp_path: Path, cluster: FakeServices) -> None:
    file, metrics = tmp_path / "keys", free_port()
    environment = {"MOTET_GATEWAY_KEYS_FILE": str(file), "MOTET_GATEWAY_KEYS_READ_SECONDS": "0.1"}
    async with (
        process(tmp_path, free_port(), cluster, MOTET_METRICS_ADDRESS=f"127.0.0.1:{metrics}", **environment),
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{metrics}", timeout=PATIENCE_S) as http,
    ):
        await answers(http, "/readyz", 503)
        async with asyncio.timeout(PATIENCE_S):
            while "API keys have not been read yet" not in (await http.get("/readyz")).text:
                await asyncio.sleep(0.05)
        assert "motet_keys_read_age_seconds +Inf" in (await http.get("/metrics")).text
        file.write_text("")
        await answers(http, "/readyz")
