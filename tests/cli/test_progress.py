"""What `motet up` says once it is up."""

from pathlib import Path
from typing import Any

import pytest

from motet.keys import KEYS_MADE_FILE
from motet_cli.readiness import StartupReady
from motet_cli.up_output import NEEDS_KEY, UpOutput, needs_key
from motet_operator.local.state_directory import StateDirectory


def item(name: str, *, ready: str, reason: str, message: str = "") -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "reason": reason, "message": message}
    return {"namespace": "default", "name": name, "model": name, "ready": ready == "True", "conditions": [condition]}


def test_objects_that_are_not_ready_are_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = {
        "pools": [item("demo", ready="False", reason="ScaledToZero", message="replicas is 0; raise it to serve")],
        "adapters": [
            item("good", ready="True", reason="Serving"),
            item("bad", ready="False", reason="FetchFailed", message="there is no folder /x."),
        ],
    }
    UpOutput(StateDirectory.of(tmp_path), "http://127.0.0.1:8000", "Who?").ready(StartupReady(status=status), hint="")
    said = capsys.readouterr().out
    assert "! pool default/demo is not ready: ScaledToZero: replicas is 0; raise it to serve" in said
    assert "! adapter default/bad is not ready: FetchFailed: there is no folder /x." in said
    assert "default/good is not ready" not in said


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
