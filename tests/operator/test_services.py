"""How the local operator starts processes, and asks a gateway whether it listens."""

import asyncio
import json
from pathlib import Path

import pytest

from motet.processes import ProcessRecord, ProcessRecords
from motet.settings import ProcessSettings
from motet_operator.local.parent import operator_spec, own_environment
from motet_operator.local.service_specs import ServiceSpecs, listens_http
from motet_operator.local.state_directory import StateDirectory
from motet_operator.local.status import StatusFile
from motet_operator.reconcile import RunnerTemplate
from motet_operator.settings import Settings
from tests.operator.builders import name


def test_no_process_gets_the_api_key_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for `motet chat`; and another key is no reason to start anything again."""
    monkeypatch.setenv("MOTET_API_KEY", "motet_0123456789abcdef_of-a-person")
    monkeypatch.setenv("MOTET_STEP_TRACE", "/tmp/trace")
    layout = StateDirectory(tmp_path)
    services = ServiceSpecs(layout, ProcessSettings(data_dir=tmp_path), Settings(manifests=tmp_path))
    specs = [
        *services.control(store_ready=True),
        services.runner("runner", "motet/demo", "1", RunnerTemplate(group=name("demo"), model_uri="")),
        operator_spec(layout, own_environment()),
    ]
    assert len({spec.kind for spec in specs}) == 6
    for spec in specs:
        assert "MOTET_STEP_TRACE" in spec.env
        assert "MOTET_API_KEY" not in spec.env, spec.name


@pytest.mark.parametrize(("status", "listens"), [("200 OK", True), ("503 Service Unavailable", True), (None, False)])
async def test_a_gateway_listens_once_it_answers_whatever_its_health(status: str | None, *, listens: bool) -> None:
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        if status is not None:
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        assert await listens_http("127.0.0.1", server.sockets[0].getsockname()[1]) is listens
    assert asked == [b"GET /health HTTP/1.1\r\n"]  # one of the two paths that need no API key


async def test_the_status_is_read_until_the_operator_has_reported_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of thousands of adapters it is long, and the operator is asked for ever."""
    layout = StateDirectory(tmp_path)
    reads = list[Path]()
    read = StatusFile.read
    monkeypatch.setattr(StatusFile, "read", lambda one: reads.append(layout.status) or read(one))
    probe = operator_spec(layout, {}).probe

    def started(pid: int) -> None:
        ProcessRecords(layout.operator_records).write(
            ProcessRecord(name="operator", kind="operator", pid=pid, start_ticks=1, boot="", fingerprint="", log="")
        )

    assert not await probe()
    started(7)
    assert not await probe()
    layout.status.write_text(json.dumps({"operator": 7}))
    assert await probe()
    reads.clear()
    assert await probe()
    assert not reads
    started(8)
    assert not await probe(), "the status is of the one before"
    layout.status.write_text(json.dumps({"operator": 8}))
    assert await probe()
