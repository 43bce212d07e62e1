"""The step trace of an engine whose disk is full or cannot be written."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.runner.engines import ask, make_engine, run


@pytest.mark.parametrize("trace", ["/dev/full", "/dev/null/below/a/file", "/"])
def test_a_trace_that_cannot_be_written_ends_and_the_engine_goes_on(llama: Path, trace: str) -> None:
    with capture_logs() as logs:
        engine = make_engine(llama, step_trace=Path(trace))
        ran = run(engine, ask("a", max_tokens=8))
    assert len(ran.tokens["a"]) == 8
    (line,) = [line for line in logs if line["event"] == "step_trace_stopped"]
    assert line["path"] == trace
    assert line["reason"]
