"""Results of benchmarks are kept by name and processor, each with its commit, if they can be measured again."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page import settings_of_parts
from tools.keep_results import keep, obstacle
from tools.performance.results import Measured, read_results, read_rows
from tools.performance.tables import TABLES, missed_table, table_of

FIVE_PAIRS = {"baseline": "b", "ratio": 2.0, "spread": [1.9, 2.1], "pairs": 5, "discarded": 0, "disturbed": False}


def row(name: str, value: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": "x", "target": "", "holds": None, "against": FIVE_PAIRS} | more


def printed(commit: str, *rows: dict[str, Any], processor: str = "a processor", benchmark: str = "engine") -> str:
    machine = {"processor": processor, "cores": 2, "memory_gib": 8.0, "load": 0.5, "system": "a system"}
    return json.dumps({"benchmark": benchmark, "commit": commit, "machine": machine, "results": rows})


def test_a_new_result_takes_the_place_of_the_older_one_of_its_name_and_processor(tmp_path: Path) -> None:
    assert keep(["a table", printed("first", row("base", 1.0), row("distinct", 2.0))], tmp_path) == []
    assert keep([printed("second", row("distinct", 3.0))], tmp_path) == []
    assert keep([printed("third", row("distinct", 4.0), processor="another")], tmp_path) == []
    kept = json.loads((tmp_path / "engine.json").read_text())["results"]
    assert [(one["name"], one["value"], one["commit"], one["processor"]) for one in kept] == [
        ("base", 1.0, "first", "a processor"),
        ("distinct", 3.0, "second", "a processor"),
        ("distinct", 4.0, "third", "another"),
    ]
    assert "load" not in kept[0]


@pytest.mark.parametrize(
    ("commit", "more", "why"),
    [
        ("abc+", {}, "its tree had changes that are in no commit"),
        ("", {}, "its tree had changes that are in no commit"),
        ("abc", {"same": False}, "both engines gave other tokens, or none could be compared"),
        ("abc", {"against": FIVE_PAIRS | {"pairs": 4}}, "4 of at least 5 pairs"),
        ("abc", {"against": FIVE_PAIRS | {"disturbed": True}}, "other processes disturbed it"),
        ("abc+", {"against": None, "counted": True}, "its tree had changes that are in no commit"),
    ],
)
def test_what_nobody_can_measure_again_is_refused(tmp_path: Path, commit: str, more: dict[str, Any], why: str) -> None:
    assert keep([printed(commit, row("base", 1.0, **more))], tmp_path) == [f"base: {why}"]
    assert list(tmp_path.iterdir()) == []


BESIDE = {"against": None, "unit": "tok/s"}


def test_what_explains_a_figure_is_neither_kept_nor_refused(tmp_path: Path) -> None:
    rows = row("base", 2.0), row("base_ours", 90.0, **BESIDE), row("base_first_tokens", 8, against=None, holds=True)
    assert keep([printed("abc", *rows)], tmp_path) == []
    assert [one["name"] for one in read_rows(tmp_path)] == ["base"]
    assert keep([printed("abc", rows[1])], tmp_path) == ["engine: nothing was measured in pairs"]
    assert keep([printed("abc", row("launches", 8, against=None, counted=True))], tmp_path) == [], "it was counted"


def test_figures_beside_other_engines_have_the_settings_of_the_page(tmp_path: Path) -> None:
    [settings] = settings_of_parts()["llama_cpp_peer"]

    def refused(**more: Any) -> list[str]:
        said = keep([printed("abc", row("llama_cpp_bf16_8", 2.0, **more), benchmark="llama_cpp_peer")], tmp_path)
        return [line.removeprefix("llama_cpp_bf16_8: ") for line in said]

    other = "other settings than those of benchmarks.page: "
    assert refused(settings=settings | {"output": 64}) == [f"{other}output 64 for 16"]
    assert refused(settings=settings | {"unified": True}) == [f"{other}unified True for None"]
    assert refused() == ["it does not say its settings"]
    assert refused(settings=settings) == []
    assert refused(settings={name: value for name, value in settings.items() if name != "prompt"}) == []


def test_of_several_processors_the_worst_stands_against_the_target(tmp_path: Path) -> None:
    def measured(commit: str, value: float, *, holds: bool, processor: str) -> dict[str, Measured]:
        kept = row("vllm_base_8", value, holds=holds, target=">= 1.4")
        keep([printed(commit, kept, processor=processor)], tmp_path)
        return read_results(tmp_path)

    measured("old", 1.3, holds=False, processor="another")
    figures = measured("abc", 2.2, holds=True, processor="a processor")
    lines = table_of(TABLES["vllm"], figures).splitlines()
    assert lines[2] == "| base | 1.3 to 2.2 × [1.9 to 2.1] (missed: >= 1.4) | not measured |"
    assert lines[-1] == "5 pairs a figure; a processor, another; abc, old."
    assert missed_table(figures).splitlines()[2:] == [
        "| library against the same of vLLM: base, n = 8 | 1.3 to 2.2 × | >= 1.4 |"
    ]
    found = measured("def", 3.0, holds=True, processor="a processor")["vllm_base_8"]
    assert (found.value, found.values, found.holds) == (1.3, [1.3, 3.0], False)
    assert found.commits == {"old", "def"}


def test_of_a_figure_that_should_be_small_the_largest_is_the_worst(tmp_path: Path) -> None:
    most = {"target": "<= 6"}
    keep([printed("abc", row("busy_p99", 7.0, holds=False, **most))], tmp_path)
    keep([printed("def", row("busy_p99", 4.0, holds=True, **most), processor="another")], tmp_path)
    found = read_results(tmp_path)["busy_p99"]
    assert (found.value, found.holds, found.bound, list(found.values)) == (7.0, False, 6.0, [7.0, 4.0])
    assert "| 7 to 4 × [1.9 to 2.1] (missed: <= 6) |" in table_of(TABLES["uneven"], {"busy_p99": found})


def test_every_figure_of_the_page_is_one_that_is_kept_today() -> None:
    assert {kept["name"]: why for kept in read_rows() if (why := obstacle(kept)) is not None} == {}
