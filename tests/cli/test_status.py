"""What `motet status` says of adapters, from the document that `--json` prints."""

from typing import Any

import pytest

from motet_cli import status

BEFORE_SERVES = "adapter_model.safetensors is cut short. The previous version keeps serving."


def adapter(**conditions: tuple[str, str, str]) -> dict[str, Any]:
    """By type: status, reason and message."""
    fields = ("status", "reason", "message")
    listed = [{"type": name, **dict(zip(fields, said, strict=True))} for name, said in conditions.items()]
    return {"namespace": "default", "name": "desk", "model": "default/desk", "resident": [], "conditions": listed}


def printed(adapter: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    ready = next(one["status"] == "True" for one in adapter["conditions"] if one["type"] == "Ready")
    listed = [adapter | {"ready": ready}]
    status.print_status(
        {"services": [], "runners": [], "pools": [], "adapters": listed, "problems": [], "url": "", "answers": []}, []
    )
    return capsys.readouterr().out.splitlines()[-1].rstrip()


def test_status_shows_that_an_adapter_serves(capsys: pytest.CaptureFixture[str]) -> None:
    line = printed(adapter(ArtifactReady=("True", "Verified", "sha256:…"), Ready=("True", "Serving", "")), capsys)
    assert line.split() == ["default/desk", "default/desk", "yes", "-", "Serving"]


def test_status_shows_why_an_adapter_does_not_serve(capsys: pytest.CaptureFixture[str]) -> None:
    refused = ("False", "FormatRejected", "adapter_model.safetensors is cut short.")
    line = printed(adapter(ArtifactReady=refused, Ready=refused), capsys)
    assert line.endswith("no      -          FormatRejected: adapter_model.safetensors is cut short.")


def test_status_shows_why_a_new_revision_is_refused_while_the_old_one_serves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else whoever saved them would wait for answers that never come."""
    line = printed(
        adapter(
            Accepted=("True", "Valid", ""),
            ArtifactReady=("False", "FormatRejected", BEFORE_SERVES),
            Certified=("Unknown", "FormatRejected", "the adapter is not checked, because ArtifactReady is False"),
            Ready=("True", "Serving", ""),
        ),
        capsys,
    )
    assert line.endswith(f"yes     -          Serving, but FormatRejected: {BEFORE_SERVES}")


def test_status_shows_what_a_runner_computes_with(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = {"serving": "torch", "since": "2026-01-02T03:04:05Z", "note": "g++ failed: error: no [/-x] option"}
    runners = [{"name": "demo-1", "kernels": kernels}]
    status.print_status(
        {"services": [], "runners": runners, "pools": [], "adapters": [], "problems": [], "url": "", "answers": []}, []
    )
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["runner", "computes", "with", "since", "note"]
    assert line.split(maxsplit=3) == ["demo-1", "torch", kernels["since"], kernels["note"]]


def test_a_pipe_gets_one_line_for_each_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    long = ("False", "FetchFailed", "a long path " * 40)
    assert printed(adapter(Ready=long), capsys).startswith("default/desk")


@pytest.mark.parametrize("said", ["field [/x]", "[bold]field[/bold]", "[link=x]", ":smile:", "\\[/x]", "[red]"])
def test_status_shows_foreign_text_as_it_is(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(adapter(Ready=("False", "UnknownField", said)), capsys).endswith(f"UnknownField: {said}")
    one = adapter(Ready=("True", "Serving", "")) | {
        "model": said,
        "ready": True,
        "resident": [{"runner": said, "tier": said}],
    }
    pool = {"namespace": said, "name": said, "model": said, "ready": 1, "replicas": 1, "conditions": one["conditions"]}
    service = {"name": said, "kind": said, "pid": 1, "ready": True, "restarts": 0}
    runner = {"name": said, "kernels": {"serving": said, "since": said, "note": said}}
    document = {"services": [service], "runners": [runner], "pools": [pool], "adapters": [one]}
    status.print_status({**document, "problems": [said], "url": said, "answers": []}, [said])
    assert capsys.readouterr().out.count(said) == 2 + 1 + 2 + 4 + 3 + 3


def test_status_obeys_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    line = printed(adapter(Ready=("False", "UnknownField", "\x1b[2J\x07 \u202e")), capsys)
    assert line.endswith(r"UnknownField: \x1b[2J\x07 \u202e")
