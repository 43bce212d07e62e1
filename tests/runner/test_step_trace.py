"""The step trace of an engine whose disk is full or cannot be written."""

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from motet.domain import Digest
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig
from motet_simulator.profiles.step_traces import read
from tests.runner.engines import ask, load, make_engine, run


@pytest.mark.parametrize("trace", ["/dev/full", "/dev/null/below/a/file", "/"])
def test_a_trace_that_cannot_be_written_ends_and_the_engine_goes_on(llama: Path, trace: str) -> None:
    with capture_logs() as logs:
        engine = make_engine(llama, step_trace=Path(trace))
        ran = run(engine, ask("a", max_tokens=8))
    assert len(ran.tokens["a"]) == 8
    (line,) = [line for line in logs if line["event"] == "step_trace_stopped"]
    assert line["path"] == trace
    assert line["reason"]


def test_a_trace_says_of_what_its_times_are_and_what_each_iteration_computed(llama: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    engine = make_engine(llama, step_trace=trace)
    run(engine, ask("a", max_tokens=5, prompt=40), ask("b", max_tokens=5, prompt=20))
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    first, *others = [line for line in lines if line["prefill"] or line["decode"]]
    assert first["of"].keys() == {"machine", "model", "kernels", "engine"}
    assert first["of"]["kernels"] == engine.info.kernels.serving
    assert first["of"]["engine"]["pages"] == engine.info.pages
    assert not any("of" in line for line in others), "the kernels are the same"
    assert first["attended"] == 40 * 41 // 2 + 20 * 21 // 2
    assert [line["context"] for line in (first, *others)][:4] == [0, 41 + 21, 42 + 22, 43 + 23]
    timed, iterations = read([trace])
    assert timed.engine.max_sequences == engine.info.max_sequences
    assert len(iterations) == len(lines)


def test_promises_of_answers_that_begin_and_end_in_one_iteration_are_on_its_line(llama: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    run(make_engine(llama, step_trace=trace), ask("short", max_tokens=1, prompt=40), ask("long", max_tokens=5))
    first, *others = [json.loads(line) for line in trace.read_text().splitlines()]
    assert first["promises"].keys() == {"short", "long"}
    assert not any("promises" in line for line in others), "they have not changed"


def test_the_first_line_says_of_what_a_trace_is_also_while_an_adapter_is_awaited(
    llama: Path, adapters: list[Path], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    engine = make_engine(llama, step_trace=trace)
    load(engine, Digest("a"), adapters[0])
    run(engine, ask("a", max_tokens=5, adapter=Digest("a")))
    first, *others = [json.loads(line) for line in trace.read_text().splitlines()]
    assert "of" in first
    assert not any("of" in line for line in others)
    assert len(read([trace])[1]) == 5


def test_a_runner_goes_on_with_the_trace_of_one_that_was_killed_while_it_wrote(llama: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    for part in ("", '{"step": 9, "ms'):
        with trace.open("a") as file:
            file.write(part)
        run(make_engine(llama, step_trace=trace), ask("a", max_tokens=5))
    lines = trace.read_text().splitlines()
    assert lines.count('{"step": 9, "ms') == 1
    assert "" not in lines
    assert len(read([trace])[1]) == len(lines) - 1


def test_a_cycle_lasts_from_the_end_of_one_iteration_to_that_of_the_next(llama: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    config = EngineConfig(model=llama, step_trace=trace, kv_cache_mib=4, device="cpu", threads=1, plan_ahead=0)
    engine = Engine(config, clock=clock)
    run(engine, ask("a", max_tokens=4))
    engine.idle()
    run(engine, ask("b", max_tokens=3))
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    begins = [number for number, line in enumerate(lines) if line["prefill"]]
    assert ["cycle" in line for line in lines] == [number not in begins for number in range(len(lines))]
    assert all(line["cycle"] > line["ms"] for line in lines if "cycle" in line), "what lies between is in it"
