"""Memory that ends in the compiled kernels: an error in Python, and nothing else."""

import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch

from motet_kernels.cpp import PagedAttention
from motet_runner.execute.load.load_model import load
from testbed.compiled_kernels import compiled_library, needs_a_compiler
from tests.runner.engines import kernels_named
from tests.runner.families import BY_NAME, save_model
from tests.runner.trials import pack, probe_logits
from tests.support.little_memory import Counts

HOOK = Path(__file__).parent / "failing_new.cpp"


def test_each_allocation_of_the_library_may_fail(tmp_path: Path) -> None:
    """At the border and in threads that help, in each kernel and in whole iterations."""
    compiled_library()
    hook = tmp_path / "failing_new.so"
    compiler = str(needs_a_compiler())
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", str(HOOK), "-o", str(hook)], check=True, timeout=120)
    checks = [sys.executable, "-m", "tests.kernels.memory_checks", str(tmp_path)]
    preloaded = " ".join([str(hook), os.environ.get("LD_PRELOAD", "")]).strip()
    ran = subprocess.run(checks, check=False, timeout=400, capture_output=True, text=True,
                         env={**os.environ, "LD_PRELOAD": preloaded})  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_buffers_that_could_not_grow_are_the_former_ones(family: str, tmp_path: Path) -> None:
    """Whichever of them got no memory. Later iterations have no more rows than these have room for."""
    loaded = load(save_model(BY_NAME[family].config, tmp_path), "float32", "cpu")
    pack(loaded, kernels_named("cpp"))
    forward = loaded.fused.program

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return probe_logits(loaded, lambda pages: PagedAttention(compiled_library(), pages))

    expected = logits()
    room = forward._room  # noqa: SLF001
    assert room > 0
    for number in count(1):
        try:
            with Counts(number):
                forward._make_room(room + 1)  # noqa: SLF001
        except torch.OutOfMemoryError:
            assert forward._room == room  # noqa: SLF001
            assert torch.equal(logits(), expected)
        else:
            break
    assert number > 3
    assert forward._room == 2 * room  # noqa: SLF001
    assert torch.equal(logits(), expected)
