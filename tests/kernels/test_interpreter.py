"""The tests of `tests/gpu` in Triton's interpreter, in a few processes: each imports torch and transformers once."""

import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from testbed.tree import ROOT

FILES = {file.stem.removeprefix("test_"): file for file in sorted((ROOT / "tests/gpu").glob("test_*.py"))}
ENGINES = [name for name in FILES if name.startswith(("engine", "adapter", "decode"))]
GROUPS = {
    "engines": ENGINES[::2],
    "other engines": ENGINES[1::2],
    "kernels": [name for name in FILES if name not in ENGINES],
}


CASES = [
    *(pytest.param(names, "not soak", id=group) for group, names in GROUPS.items()),
    pytest.param(FILES, "soak", id="what takes long", marks=pytest.mark.soak),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("names", "which"), CASES)
def test_the_gpu_path_computes_right_in_the_interpreter(names: Iterable[str], which: str) -> None:
    files = [FILES[name] for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", f"not gpu and {which}", *files],
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
