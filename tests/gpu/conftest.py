"""Tests of what computes on a GPU. With a CUDA device they run there. Elsewhere Triton's interpreter runs them, in a
process of its own (`tests/kernels/test_interpreter.py`): Triton decides when it is imported, and torch imports it.
"""

import os
from collections.abc import Generator, Iterator

import pytest
import torch

from testbed.interpreter import leave_out_what_nobody_reads

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not interpreted:
    collect_ignore_glob = ["test_*.py"]
elif not interpreted:
    collect_ignore_glob = ["test_lora_loads.py"]  # only the interpreter shows each load

if interpreted:
    leave_out_what_nobody_reads()


@pytest.fixture(autouse=interpreted)
def little_to_judge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as a runner judges are those of the tests of logits; the one of kernels that are wrong judges few.
    All others are compared with what is right."""
    test = request.function.__name__
    if test.startswith("test_kernels_that_compute_something_else"):
        judge_few(monkeypatch)
    elif not test.startswith("test_logits"):
        judge_nothing(monkeypatch)


@pytest.fixture(scope="module")
def unjudged() -> Iterator[None]:
    """For engines of a whole module, which are made before the fixture above begins"""
    with pytest.MonkeyPatch.context() as patch:
        if interpreted:
            judge_nothing(patch)
        yield


def judge_few(patch: pytest.MonkeyPatch) -> None:
    """The interpreter judges a model's kernels for longer than it computes all else."""
    from motet_runner.execute.gate import gate

    patch.setattr(gate, "CROWD", gate.PARTS)


def judge_nothing(patch: pytest.MonkeyPatch) -> None:
    from motet_runner.execute.gate import gate

    judge_few(patch)
    patch.setattr("motet_runner.engine.fault_of", lambda *_: "")
    for judgement in ("prepare", "fault_of", "fault_of_forward"):
        patch.setattr(gate.Gate, judgement, no_fault)


def no_fault(*_: object) -> Generator[None, None, str]:
    yield from ()
    return ""
