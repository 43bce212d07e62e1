"""The tests of `tests/gpu` in Triton's interpreter, in one process, which imports torch and transformers once."""

import os
import subprocess
import sys

import pytest

from testbed.tree import ROOT


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("which", ["not soak", pytest.param("soak", marks=pytest.mark.soak)])
def test_the_gpu_path_computes_right_in_the_interpreter(which: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", f"not gpu and {which}", "tests/gpu"],
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
