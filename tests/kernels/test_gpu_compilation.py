"""The kernels of the GPU path are compiled for a Hopper card, in a process that has none."""

import json
import os
import subprocess
import sys

import pytest

from tests.repo.tree import ROOT
from tools.cache_folder import cache_folder

SHARED_BYTES = 227 * 1024
"""What a program can have of a processor's shared memory"""

SPILLED_BYTES = {"lora_expand": 1000}
"""Of a thread, beyond its registers. Those that are not here spill nothing."""

KERNELS = {
    "attention": {"place_decodes", "cut_sequences", "attend_pieces", "add_pieces", "attend_tiles", "write_rows"},
    "lora": {"lora_shrink", "lora_expand"},
    "layer": {"_add_norm_kernel", "_rotate_and_write_kernel", "_silu_multiply_kernel"},
}


@pytest.mark.parametrize("part", KERNELS)
def test_kernels_fit_a_hopper_card_and_are_compiled_once(part: str) -> None:
    cache = cache_folder(os.environ, "triton", named_by="TRITON_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.hopper", part],
        cwd=ROOT,
        env=environment | {"CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {each["kernel"] for each in compiled} == KERNELS[part]
    assert [each for each in compiled if each["shared"] > SHARED_BYTES] == []
    assert [each for each in compiled if each["spilled"] > SPILLED_BYTES.get(each["kernel"], 0)] == []
    assert [each for each in compiled if each["step"] > 0] == []
