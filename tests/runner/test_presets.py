"""Every preset on a real model: the same kernels, the same tokens, no padding."""

import json
from pathlib import Path

import pytest

from motet_runner.plan import PRESETS
from tests.runner.engines import ask, make_engine, run

ASKED = [ask(f"r{index}", prompt=5 + 13 * index, max_tokens=4 + 5 * (index % 3)) for index in range(6)]


@pytest.fixture(scope="module")
def alone(llama: Path) -> dict[str, list[int]]:
    """Each sequence's tokens when no other is there."""
    engine = make_engine(llama)
    return {one.request: run(engine, one).tokens[one.request] for one in ASKED}


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_changes_when_tokens_come_and_not_which(
    preset: str, llama: Path, alone: dict[str, list[int]], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    engine = make_engine(llama, preset=preset, max_concurrent_sequences=3, step_trace=trace)
    ran = run(engine, *ASKED)
    assert ran.tokens == alone
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {(line["calls"], line["padding"]) for line in lines} == {(1, 0)}
    # Each token is computed once, but for the last one of each answer, which nobody asks to continue (OR-03).
    computed = sum(line["prefill"] + line["decode"] for line in lines)
    assert computed == sum(len(one.prompt) + one.sampling.max_tokens - 1 for one in ASKED)
