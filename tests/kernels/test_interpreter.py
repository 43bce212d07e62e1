"""The tests of `tests/gpu` in Triton's interpreter, each file in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.tree import ROOT

FILES = sorted((ROOT / "tests/gpu").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.removeprefix("test_"))
def test_the_gpu_path_computes_right_in_the_interpreter(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not soak", str(file)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    closing_line = done.stdout.strip().splitlines()[-1]
    assert "passed" in closing_line, closing_line
    assert "skipped" not in closing_line, closing_line
