"""Tests of what computes on a GPU. With a CUDA device they run there. Elsewhere Triton's interpreter runs them, in a
process of its own (`tests/kernels/test_interpreter.py`): Triton decides when it is imported, and torch imports it.
"""

import os
from collections.abc import Generator

import pytest
import torch

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not interpreted:
    collect_ignore_glob = ["test_*.py"]
elif not interpreted:
    collect_ignore_glob = ["test_lora_loads.py"]  # only the interpreter shows each load


@pytest.fixture(autouse=interpreted)
def little_to_judge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter judges a model's kernels for longer than it computes all else. As many rows as a runner judges
    are those of the tests of logits; the one of kernels that are wrong judges few. All others are compared with what is
    right."""
    from motet_runner.execute.gate import gate

    test = request.function.__name__
    if not test.startswith("test_logits"):
        monkeypatch.setattr(gate, "CROWD", gate.PARTS)
    if not test.startswith(("test_logits", "test_kernels_that_compute_something_else")):
        monkeypatch.setattr("motet_runner.engine.fault_of", lambda *_: "")
        for judgement in ("prepare", "fault_of", "fault_of_forward"):
            monkeypatch.setattr(gate.Gate, judgement, no_fault)


def no_fault(*_: object) -> Generator[None, None, str]:
    yield from ()
    return ""
