"""Tests of what computes on a GPU. With a CUDA device they run there. Elsewhere Triton's interpreter runs them, in a
process of its own (`tests/kernels/test_interpreter.py`): Triton decides when it is imported, and torch imports it.
"""

import os

import pytest
import torch

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not interpreted:
    collect_ignore_glob = ["test_*.py"]
elif not interpreted:
    collect_ignore_glob = ["test_lora_loads.py"]  # only the interpreter shows each load


@pytest.fixture(autouse=interpreted)
def few_rows_to_judge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter would compute the gate's many rows longer than all else: `test_forward.py` has them."""
    if request.module.__name__.rpartition(".")[2] != "test_forward":
        from motet_runner.execute import gate

        monkeypatch.setattr(gate, "CROWD", gate.PARTS)
