"""`benchmarks.large` measures the memory that it says, of a model that is complete."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.random_llama import LlamaShape, random_llama
from motet_runner.execute.load.load_model import load
from testbed.tree import ROOT

SHAPE = LlamaShape(vocabulary=512, width=64, feed_forward=64, layers=2, heads=4, kv_heads=2, shard_mib=0)


def test_a_random_llama_is_made_once_in_shards_and_again_if_it_was_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("benchmarks.random_llama.save_file", interrupt)
        random_llama(SHAPE, tmp_path)
    assert list(tmp_path.iterdir()) == []
    model = random_llama(SHAPE, tmp_path)
    made = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    assert len([name for name in made if name.endswith(".safetensors")]) > 2
    assert random_llama(SHAPE, tmp_path) == model
    assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == made
    assert load(model, "bfloat16", "cpu").vocabulary == 512


def test_memory_is_counted_from_its_beginning_and_its_peak_is_kept() -> None:
    """In a process of its own: this one may have memory that it can use again without growing."""
    script = """
from benchmarks.large import Memory
MIB = 2**20
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
