"""The types are checked that carry most: mypy knows a tensor, and takes nothing else for one."""

import re
import sys
from pathlib import Path

import pytest

from testbed.tree import ROOT
from tools import type_check

CALLS = """
import numpy
import torch
from motet_kernels import LoraBatch, TorchBackend

def calls(y: torch.Tensor, x: torch.Tensor, rows: numpy.ndarray, kernels: TorchBackend, batch: LoraBatch) -> None:
    kernels.add_lora(y, x, "q_proj", batch)
    kernels.add_lora(y, x @ x.t(), "q_proj", batch)
    kernels.add_lora(y, rows, "q_proj", batch)  # wrong: ndarray
    kernels.add_lora(y, x.tolist(), "q_proj", batch)  # wrong: list
    kernels.add_lora(y, x.shape, "q_proj", batch)  # wrong: Size
"""
"""Only correct where no comment says otherwise."""


def test_make_lint_refuses_a_wrong_tensor_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong_tensors.py"
    file.write_text(CALLS)
    monkeypatch.chdir(ROOT)
    # Two seconds with what mypy learned in `make lint`; half a minute of CPU time where it has learned nothing yet.
    status = type_check.run([sys.executable, "-m", "mypy", str(file)])
    said = capfd.readouterr().out
    found = re.findall(r':(\d+): error: .* incompatible type "(\w+).*; expected "Tensor"', said)
    wrong = [(str(n), line.split("wrong: ")[1]) for n, line in enumerate(CALLS.splitlines(), 1) if "wrong: " in line]
    assert (status, found) == (1, wrong), said
    assert said.count("error:") == len(wrong), said
