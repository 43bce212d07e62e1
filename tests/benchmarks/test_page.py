"""`benchmarks.page` measures what the page shows."""

import sys
from pathlib import Path

import pytest

from benchmarks import engine, page, vllm_peer
from benchmarks.page import PARTS, Part, settings_of_parts
from tools.performance.tables import TABLES

NOT_TIMED = {"counted"}


def cases(module: str, *options: str) -> set[str]:
    commands = [part.command.split() for part in PARTS.values()]
    chosen = [words for words in commands if words[0] == module and all(option in words for option in options)]
    after = [words[words.index("--cases") + 1 :] for words in chosen]
    known = {*vllm_peer.CASES, vllm_peer.SERVED, *engine.CASES}
    return {word for words in after for word in words if word in known}


def test_its_parts_have_every_case_that_has_a_row() -> None:
    assert cases("vllm_peer", "cpp") == {*vllm_peer.CASES, vllm_peer.SERVED}
    assert cases("vllm_peer", "torch") == {"base", "identical", "skewed", "distinct"}
    assert cases("engine") == {*engine.CASES} - {"gained", "host", "program"}
    modules = {part.command.split()[0] for part in PARTS.values()}
    assert modules == {"vllm_peer", "llama_cpp_peer", "engine", "lora_op", "served"}
    assert sum(name not in NOT_TIMED for name in TABLES) == 10


def test_a_part_that_fails_keeps_no_other_one_from_being_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, whole = Part(1, "raise SystemExit('no')"), Part(1, "print('a figure'); print('{}'); raise SystemExit(3)")
    monkeypatch.setattr(page, "PARTS", {"broken": broken, "whole": whole})
    monkeypatch.setattr(page, "command_of", lambda part, _: [sys.executable, "-c", part.command])
    assert page.measure(["broken", "whole"], 5, tmp_path) == ["broken"]  # a missed target is no failure
    assert (tmp_path / "whole.txt").read_text() == "a figure\n{}\n"
    assert "a figure\n== whole: 0.0 minutes, status 3" in capsys.readouterr().out


def test_a_run_that_is_stopped_leaves_no_older_figures_of_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "PARTS", {name: Part(1, "") for name in ("first", "second")})
    monkeypatch.setattr(page, "command_of", lambda *_: [str(tmp_path / "no such command")])
    for name in ("second", "other"):
        (tmp_path / f"{name}.txt").write_text("an older figure")
    with pytest.raises(FileNotFoundError):
        page.measure(["first", "second"], 5, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"first.txt", "other.txt"}


def test_the_settings_of_its_parts_are_known() -> None:
    of_vllm, [of_llama_cpp] = (settings_of_parts()[peer] for peer in ("vllm_peer", "llama_cpp_peer"))
    assert {(one["model"], one["layers"], one["prompt"], one["output"]) for one in of_vllm} == {
        ("30m", 8, 64, 64),
        ("1b", 22, 16, 16),
    }
    assert of_llama_cpp in of_vllm
