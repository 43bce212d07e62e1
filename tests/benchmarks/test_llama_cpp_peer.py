"""`benchmarks.llama_cpp_peer` without llama.cpp: what it asks, what it keeps, and the weights that it writes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import llama_cpp_peer
from benchmarks.gguf_of_llama import with_pairs_of_neighbours, write_gguf
from benchmarks.harness import MISSED, SKIPPED
from benchmarks.page import settings_of_parts
from benchmarks.peer_sizes import settings_of
from benchmarks.random_llama import LlamaShape, random_llama
from tests.repo.tree import ROOT

FAKE = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    with open({asked!r}, "a") as log:
        log.write(line)
    prompts = asked.get("prompts", [])
    tokens = [[0] * asked["output"] for _ in prompts] if prompts else []
    about = {{"version": "0.1", "threads": 2, "system": "OPENMP = 1"}}
    print(json.dumps({{"seconds": 100.0, "tokens": tokens, "margins": [0.0] * len(prompts)}} | about), flush=True)
"""
"""A peer that takes a hundred seconds for everything, and is never sure."""


def run_peer(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.llama_cpp_peer", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_without_llama_cpp_it_is_skipped_and_says_what_to_do(tmp_path: Path) -> None:
    done = run_peer(f"--python={tmp_path}/python")
    assert done.returncode == SKIPPED
    assert "`make peer PEERS=llama.cpp` builds an environment with llama.cpp" in done.stdout


def test_both_engines_get_the_same_requests_and_results_say_what_was_compiled(tmp_path: Path) -> None:
    asked, fake, python = tmp_path / "asked", tmp_path / "fake.py", tmp_path / "python"
    fake.write_text(FAKE.format(asked=str(asked)))
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {fake}\n")
    python.chmod(0o755)
    sizes = "--model=30m --layers=2 --width=64 --vocabulary=128 --context=128 --kv-mib=8 --prompt=8 --output=4"
    cases = "--kernels torch --requests 1 3 --pairs 1 --their-threads 2 --json"
    done = run_peer(f"--python={python}", *sizes.split(), *cases.split())
    assert done.returncode == MISSED, done.stdout + done.stderr  # no first token is compared
    results = {row["name"]: row for row in json.loads(done.stdout.splitlines()[-1])["results"]}
    figures = [name for name, row in results.items() if "against" in row]
    assert figures == [f"llama_cpp_{form}_{requests}" for form in ("bf16", "q8_0") for requests in (1, 3)]
    assert results["llama_cpp_q8_0_3"]["target"] == ""
    assert results["llama_cpp_q8_0_3"]["same"] is False
    assert results["llama_cpp_q8_0_3"]["settings"].items() >= {"model": "30m", "layers": 2, "output": 4}.items()
    baseline = "llama.cpp, q8_0, version 0.1, 2 threads, OPENMP = 1"
    assert results["llama_cpp_q8_0_3"]["against"]["baseline"] == baseline
    questions = [json.loads(line) for line in asked.read_text().splitlines()]
    loads = [question for question in questions if question["do"] == "load"]
    assert [(load["format"], load["length"], load["sequences"]) for load in loads] == [
        ("bf16", 256, 3),
        ("q8_0", 256, 3),
    ]
    generated = [question for question in questions if question["do"] == "generate"]
    assert {owner for question in generated for owner in question["adapters"]} == {None}
    assert {len(question["prompts"]) for question in generated} == {1, 3}


def test_without_options_it_measures_what_the_page_shows() -> None:
    assert settings_of(llama_cpp_peer.parsed([])) == settings_of_parts()["llama_cpp_peer"][0]


def rotated(x: Any, angles: Any, pairs: list[tuple[int, int]]) -> Any:
    turned = x.copy()
    for angle, (a, b) in zip(angles, pairs, strict=True):
        turned[a] = x[a] * np.cos(angle) - x[b] * np.sin(angle)
        turned[b] = x[a] * np.sin(angle) + x[b] * np.cos(angle)
    return turned


def test_rows_lie_so_that_both_rotations_give_the_same_attention() -> None:
    random, head = np.random.default_rng(0), 8
    q, k = (random.integers(1, 9, (2 * head, 3)).astype(np.uint16) for _ in range(2))
    x = random.standard_normal(3)
    at_q, at_k = (place / 10.0 ** np.arange(head // 2) for place in (5, 2))
    halves = [(i, i + head // 2) for i in range(head // 2)]
    neighbours = [(2 * i, 2 * i + 1) for i in range(head // 2)]
    of_heads = [slice(0, head), slice(head, 2 * head)]
    ours = [rotated((q @ x)[of], at_q, halves) @ rotated((k @ x)[of], at_k, halves) for of in of_heads]
    q, k = with_pairs_of_neighbours(q, 2), with_pairs_of_neighbours(k, 2)
    theirs = [rotated((q @ x)[of], at_q, neighbours) @ rotated((k @ x)[of], at_k, neighbours) for of in of_heads]
    assert np.allclose(ours, theirs)


class Writer:
    """In the place of the package gguf: keeps what it is told."""

    said: dict[str, Any]

    def __init__(self, _: Path, kind: str) -> None:
        Writer.said = {"kind": kind}

    def __getattr__(self, name: str) -> Any:
        return lambda *given: Writer.said.__setitem__(name, given)

    def add_tensor(self, name: str, values: Any, raw_dtype: str = "") -> None:
        Writer.said[name] = (values.shape, values.dtype, raw_dtype)


def test_all_weights_are_written_with_the_sizes_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = SimpleNamespace(MOSTLY_BF16=32, BF16="bf16")
    module = SimpleNamespace(GGUFWriter=Writer, LlamaFileType=kinds, GGMLQuantizationType=kinds)
    monkeypatch.setitem(sys.modules, "gguf", module)
    shape = LlamaShape(vocabulary=96, width=64, feed_forward=128, layers=1, heads=4, kv_heads=2)
    write_gguf(random_llama(shape, tmp_path), tmp_path / "model.gguf")
    said = Writer.said
    assert said["token_embd.weight"] == ((96, 128), np.dtype(np.uint8), "bf16")
    assert said["blk.0.attn_k.weight"] == ((32, 128), np.dtype(np.uint8), "bf16")
    assert said["blk.0.attn_norm.weight"] == ((64,), np.dtype(np.float32), "")
    assert (said["add_head_count_kv"], said["add_rope_freq_base"], said["add_vocab_size"]) == ((2,), (10000.0,), (96,))
    assert sum(name.endswith(".weight") for name in said) == 12
