"""`benchmarks.large` measures the memory that it says, of the processes that it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import MISSED
from benchmarks.random_llama import LlamaShape, random_llama
from motet_runner.execute.model import load
from tests.repo.tree import ROOT
from tests.support.compiled_kernels import needs_a_compiler

MIB = 2**20


@pytest.mark.parametrize("kernels", [pytest.param("torch", marks=pytest.mark.soak), "cpp"])
def test_it_fills_all_pages_and_says_its_shares(kernels: str, tmp_path: Path) -> None:
    """All sizes are far below what processes take beside them, so the shares say nothing here."""
    if kernels == "cpp":
        needs_a_compiler()
    shape = ["--layers=2", "--width=64", "--vocabulary=512", "--kv-mib=8", "--threads=1", f"--kernels={kernels}"]
    command = [sys.executable, "-m", "benchmarks.large", "--json", f"--scratch={tmp_path}", *shape]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode in (0, MISSED)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["benchmark"] == "large"
    targets = {result["name"]: result["target"] for result in said["results"]}
    suffix = "_cpp" if kernels == "cpp" else ""
    assert targets == {
        "peak_share_1b": "<= 1.15 of the weights",
        f"rss_share_1b{suffix}": "<= 1.25 of weights and KV",
        f"rss_peak_share_1b{suffix}": "",
    }
    assert "KV 8 MiB" in done.stdout
    assert int(done.stdout.split("all rows decoded together ")[1].split()[0]) > 0


SHAPE = LlamaShape(vocabulary=512, width=64, feed_forward=64, layers=2, heads=4, kv_heads=2, shard_mib=0)


def test_a_random_llama_is_made_once_in_shards(tmp_path: Path) -> None:
    model = random_llama(SHAPE, tmp_path)
    made = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    assert len([name for name in made if name.endswith(".safetensors")]) > 2
    assert random_llama(SHAPE, tmp_path) == model
    assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == made
    assert load(model, "bfloat16", "cpu").vocabulary == 512


def test_a_random_llama_that_was_not_finished_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("benchmarks.random_llama.save_file", raise_interrupt)
        random_llama(SHAPE, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert (random_llama(SHAPE, tmp_path) / "config.json").is_file()


def raise_interrupt(*_args: object, **_options: object) -> None:
    raise KeyboardInterrupt


def test_memory_is_counted_from_its_beginning_and_its_peak_is_kept() -> None:
    """In a process of its own: this one may have memory that it can use again without growing."""
    script = f"""
from benchmarks.large import Memory
MIB = {MIB}
before = b"x" * (64 * MIB)
memory = Memory()
assert memory.grown < 4 * MIB, memory.grown
held = b"x" * (32 * MIB)
for_a_moment = b"x" * (64 * MIB)
del for_a_moment
assert 31 * MIB < memory.grown < 40 * MIB, memory.grown
assert 95 * MIB < memory.peak < 104 * MIB, memory.peak
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
