"""The tests of `tests/gpu` in Triton's interpreter, in a few processes: each imports torch and transformers once."""

import os
import subprocess
import sys

import pytest

from tests.repo.tree import ROOT

FILES = {file.stem.removeprefix("test_"): file for file in sorted((ROOT / "tests/gpu").glob("test_*.py"))}
ENGINES = [name for name in FILES if name.startswith(("engine", "adapter", "decode"))]
GROUPS = {
    "engines": ENGINES[::2],
    "other engines": ENGINES[1::2],
    "kernels": [name for name in FILES if name not in ENGINES],
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("group", GROUPS)
def test_the_gpu_path_computes_right_in_the_interpreter(group: str) -> None:
    files = [FILES[name] for name in GROUPS[group]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not soak", *files],
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
