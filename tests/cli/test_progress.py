"""What `motet up` says once it is up."""

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from motet.keys import KEYS_MADE_FILE
from motet.processes import ProcessRecord, ProcessRecords
from motet.processes.linux import boot_id, identity_of
from motet_cli.readiness import StartupReady
from motet_cli.up_output import NEEDS_KEY, UpOutput, needs_key
from motet_operator.local.state_directory import StateDirectory
from tests.common.virtual_time import in_virtual_time


def item(name: str, *, ready: str, reason: str, message: str = "") -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "reason": reason, "message": message}
    return {"namespace": "default", "name": name, "model": name, "ready": ready == "True", "conditions": [condition]}


def test_objects_that_are_not_ready_are_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = {
        "pools": [item("demo", ready="False", reason="RunnerFailing", message="no such model")],
        "adapters": [
            item("good", ready="True", reason="Serving"),
            item("asleep", ready="True", reason="Suspended", message="spec.suspend is true"),
            item("bad", ready="False", reason="FetchFailed", message="there is no folder /x."),
        ],
    }
    UpOutput(StateDirectory.of(tmp_path), "http://127.0.0.1:8000", "Who?").ready(StartupReady(status=status), hint="")
    said = capsys.readouterr().out
    assert "! pool default/demo is not ready: RunnerFailing: no such model" in said
    assert "! adapter default/bad is not ready: FetchFailed: there is no folder /x." in said
    assert "! adapter default/asleep is idle: Suspended: spec.suspend is true" in said
    assert "default/good is" not in said


def of_runner(name: str, serving: str, note: str = "") -> dict[str, Any]:
    return {"name": name, "kernels": {"serving": serving, "since": "2026-01-02T03:04:05Z", "note": note}}


@in_virtual_time
async def test_the_output_says_once_what_each_runner_computes_with_and_when_that_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = StateDirectory.of(tmp_path)
    layout.prepare()
    first = of_runner("demo-1", "torch", "the compiled kernels are being built")
    output = UpOutput(layout, "http://127.0.0.1:8000", "Who?")
    output.ready(StartupReady(status={"pools": [], "adapters": [], "runners": [first]}), hint="")
    assert "  demo-1 computes with torch (the compiled kernels are being built)\n" in capsys.readouterr().out
    own = identity_of(os.getpid())
    assert own is not None
    record = ProcessRecord(
        name="operator", kind="operator", pid=own.pid, start_ticks=own.start_ticks, boot=boot_id(), fingerprint="",
        log="",
    )  # fmt: skip
    ProcessRecords(layout.operator_records).write(record)

    def write(*runners: dict[str, Any]) -> None:
        layout.status.write_bytes(orjson.dumps({"operator": own.pid, "runners": runners}))

    write(first)
    following = asyncio.create_task(output.follow())
    said = ""
    try:
        for serving in ("torch", "cpp (avx2)"):
            write(of_runner("demo-1", serving, "" if serving != "torch" else first["kernels"]["note"]))
            await asyncio.sleep(1.2)
            said += capsys.readouterr().out
    finally:
        following.cancel()
    assert re.fullmatch(r"\d\d:\d\d:\d\d demo-1 computes with cpp \(avx2\)\n", said)


def test_printed_commands_can_be_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = {"pools": [item("demo", ready="True", reason="AllRunnersReady")], "adapters": []}
    layout = StateDirectory.of(tmp_path / "a b")
    UpOutput(layout, "http://127.0.0.1:8000", "What's this?").ready(StartupReady(status=status), hint="")
    said = capsys.readouterr().out
    assert f"chat demo --data-dir '{tmp_path}/a b'" in said
    assert "What'\\''s this?" in said


@pytest.mark.parametrize(
    ("environment", "made", "needed"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"MOTET_GATEWAY_AUTH": ""}, True, True),
        ({"MOTET_GATEWAY_AUTH": "none"}, True, False),
        ({"MOTET_GATEWAY_AUTH": "keys"}, False, True),
        ({"MOTET_GATEWAY_KEYS_FILE": "/keys"}, False, True),
    ],
)
def test_the_output_says_whether_a_key_is_needed(
    tmp_path: Path, environment: dict[str, str], made: bool, needed: bool
) -> None:
    if made:
        (tmp_path / KEYS_MADE_FILE).touch()
    assert needs_key(StateDirectory.of(tmp_path), environment) is needed


def test_the_output_says_how_to_send_a_required_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOTET_GATEWAY_AUTH", "MOTET_GATEWAY_KEYS_FILE"):
        monkeypatch.delenv(name, raising=False)
    status = {"pools": [item("demo", ready="True", reason="AllRunnersReady")], "adapters": []}
    progress = UpOutput(StateDirectory.of(tmp_path), "http://127.0.0.1:8000", "Who?")
    for makes in (False, True):
        if makes:
            (tmp_path / KEYS_MADE_FILE).touch()
        progress.ready(StartupReady(status=status), hint="")
        said = capsys.readouterr().out
        assert (NEEDS_KEY in said) is makes
