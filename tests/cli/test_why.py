"""`motet why` in words: what a request waited for and how long, who refused it, and where its time went."""

from pathlib import Path
from typing import Any

import pytest

from motet_cli import why as why_module
from motet_cli.why import why


def line(seconds: float, lasted: float, by: str, event: str, detail: str = "") -> dict[str, Any]:
    return {"seconds": seconds, "lasted": lasted, "by": by, "event": event, "detail": detail}


def choice(*timeline: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "request": "ab" * 12,
        "prompt_tokens": 12,
        "max_tokens": 200,
        "tokens": 64,
        "predicted": {"by": "model:v1", "q50": 50, "q80": 80, "q90": 120, "q95": 150},
        "split": {"queue": 3.0, "generation": 0.9, "penalty": 0.0, "overhead": 0.1},
        "timeline": list(timeline),
        "left_out": 0,
        "position": None,
        "runners": [],
    } | more


def document(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "id": "ab" * 12,
        "http_id": "req-1",
        "trace": None,
        "tenant": "acme",
        "model": "pirate",
        "status": "200",
        "ended": True,
        "seconds": 4.0,
        "first_token_seconds": 3.2,
        "scheduler": None,
        "gateway": None,
        "timeline": [line(0.0, 0.1, "gateway", "received", "for pirate")],
        "choices": list(choices),
    } | more


def printed(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(why_module, "_asked", lambda *_: found)
    assert why(Path("/nowhere"), "x", url="http://here/v1/", as_json=False) == 0
    return " ".join(capsys.readouterr().out.split())


def test_it_says_what_a_request_waited_for_the_longest_first(monkeypatch, capsys):
    said = printed(
        document(
            choice(
                line(0.2, 0.5, "scheduler", "waits", "every batch is full"),
                line(0.7, 2.5, "scheduler", "held", "tenant acme is over its concurrency 1"),
                line(0.75, 2.45, "gateway", "waits", "tenant acme is over its concurrency 1 (number 1)"),
            )
        ),
        monkeypatch,
        capsys,
    )
    assert "of tenant acme to pirate ended after 4.000 s with status 200; its first token came after 3.200 s." in said
    assert "Answer: 64 tokens; predicted 50, in 9 of 10 cases at most 120 (by model:v1); 200 at most." in said
    assert "Its time: queue 3.000 s (75%), generation 0.900 s (22%), penalty 0.000 s (0%), overhead 0.100 s" in said
    first, second = (
        "It waited 2.500 s: tenant acme is over its concurrency 1.",
        "It waited 0.500 s: every batch is full.",
    )
    assert said.index(first) < said.index(second)
    assert "It waited 2.450 s" not in said, "the scheduler says it"


def test_a_wait_of_a_scheduler_before_is_known_by_the_gateway(monkeypatch, capsys):
    said = printed(
        document(choice(line(0.1, 6.5, "gateway", "waits", "no runner of this model is up (number 3)"))),
        monkeypatch,
        capsys,
    )
    assert "It waited 6.500 s: no runner of this model is up (number 3)." in said


@pytest.mark.parametrize("choices", [[], [choice(line(41.0, 0.5, "scheduler", "waits", "every batch is full"))]])
def test_a_wait_before_its_choices_is_said_too(choices, monkeypatch, capsys):
    held = line(0.1, 40.0, "gateway", "waits", "no runner of this model is up")
    said = printed(document(*choices, timeline=[held]), monkeypatch, capsys)
    assert "It waited 40.000 s: no runner of this model is up." in said


def test_a_request_that_waits_names_each_runner_that_does_not_get_it(monkeypatch, capsys):
    runners = [{"runner": "r0", "why": "it is reserved for another tenant"}]
    said = printed(
        document(choice(position=4, runners=runners, tokens=None), status=None, first_token_seconds=None),
        monkeypatch,
        capsys,
    )
    assert "is under way since 4.000 s." in said
    assert "Answer: not known yet;" in said
    assert "It waits now, as number 4. r0 does not get it: it is reserved for another tenant" in said


def test_the_names_that_its_client_knows_are_said(monkeypatch, capsys):
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    assert f"(x-request-id req-1, trace {trace}) of tenant" in printed(document(trace=trace), monkeypatch, capsys)
    older = {name: value for name, value in document(http_id=None).items() if name != "trace"}
    assert "Request a of" in printed(older | {"id": "a"}, monkeypatch, capsys)


def test_a_missing_half_is_named(monkeypatch, capsys):
    half = choice(predicted=None, split=None, prompt_tokens=None, max_tokens=None, tokens=None)
    said = printed(
        document(half, gateway="this gateway has not served it", model=None, http_id=None, status=None, timeline=[]),
        monkeypatch,
        capsys,
    )
    assert "The gateway's half is missing: this gateway has not served it." in said
