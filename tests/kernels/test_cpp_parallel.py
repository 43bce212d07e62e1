"""The threads of the compiled kernels: they help whoever calls, and nobody depends on them."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from motet_kernels.cpp.builder import SOURCE
from motet_kernels.cpp.linear import PackedWeights
from testbed.compiled_kernels import CACHE, compiled_library, needs_a_compiler

CALLERS, CALLS = 3, 200

CHECKS = Path(__file__).parent / "parallel_checks.cpp"


def test_stages_keep_every_promise_of_their_header(tmp_path: Path) -> None:
    """Each unit once, after the stage before; helpers that help, take over, sleep, wake, and stay within bounds."""
    program = tmp_path / "checks"
    options = ["-std=c++17", "-O2", "-pthread", f"-I{SOURCE}"]
    sources = [str(CHECKS), str(SOURCE / "parallel.cpp")]
    subprocess.run([str(needs_a_compiler()), *options, *sources, "-o", str(program)], check=True, timeout=120)
    ran = subprocess.run([str(program)], check=False, timeout=120, stdout=subprocess.PIPE, text=True)
    assert (ran.returncode, ran.stdout) == (0, "")


@pytest.mark.usefixtures("threads")
def test_callers_at_the_same_time_get_their_own_results() -> None:
    """Each has other rows, and takes the helpers from the others."""
    torch.set_num_threads(3)
    random = torch.Generator().manual_seed(0)
    packed = PackedWeights(compiled_library(), [torch.randn(512, 256, generator=random)])
    rows = [torch.randn(9, 256, generator=random) for _ in range(CALLERS)]
    expected = [packed.linear(x) for x in rows]

    def call(number: int) -> bool:
        torch.set_num_threads(3)  # torch counts them by thread
        return all(torch.equal(packed.linear(rows[number]), expected[number]) for _ in range(CALLS))

    with ThreadPoolExecutor(CALLERS) as callers:
        assert all(callers.map(call, range(CALLERS)))


SCRIPT = """
import os, sys, time, torch
from pathlib import Path
from motet_kernels.cpp import build
from motet_kernels.cpp.linear import PackedWeights

packed = PackedWeights(build(Path(sys.argv[1])).library, [torch.randn(512, 512)])
x = torch.randn(8, 512)
torch.set_num_threads(4)
expected = packed.linear(x)
{then}
assert torch.equal(packed.linear(x), expected)
"""


def in_a_process(then: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(then=then), str(CACHE)]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "MALLOC_ARENA_MAX": "2"})


def test_helpers_without_a_core_of_their_own_keep_nobody_waiting() -> None:
    """Four threads on one core: a caller that waited for each helper's turn would take many times as long as alone.
    Whoever else wants that core delays both alike."""
    compiled_library()
    in_a_process("""
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # only this thread; helpers that exist keep their cores
for task in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(task), os.sched_getaffinity(0))

def seconds(threads):
    torch.set_num_threads(threads)
    began = time.perf_counter()
    for _ in range(100):
        packed.linear(x)
    return time.perf_counter() - began

taken = [(seconds(4), seconds(1)) for _ in range(10)]
together, alone = (min(column) for column in zip(*taken))
assert together < 3 * alone, (together, alone)
""")


def test_a_forked_process_computes_without_the_helpers() -> None:
    """They are not in it. A child in whose memory they sleep, or hold a lock, waits for none of them."""
    compiled_library()
    in_a_process("""
for _ in range(6):
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(packed.linear(x), expected) else 1)
    assert torch.equal(packed.linear(x), expected)
    assert os.waitpid(child, 0)[1] == 0
""")
