"""The decode steps of `benchmarks.gpu` compile for a card, at its real sizes, before there is one."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu_goals.bench import Bench, Sizes
from benchmarks.gpu_goals.clock import Rehearsal
from benchmarks.gpu_goals.models import LLAMA_7B, LLAMA_8B, Adapters, DecodeStep, Model, Shape
from benchmarks.gpu_goals.served import LLAMA_SMALL
from tests.support.gpu_compiler import SPILLED_BYTES, launches_are_compiled

SHARED_BYTES = 227 * 1024
LAYERS = 2
"""Kernels are compiled once for all layers."""


class WithoutMemory(Bench):
    """Tensors have sizes and no numbers, so that a whole model costs nothing."""

    def __post_init__(self) -> None:
        self.generator = None


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        (LLAMA_SMALL, [1, 128]),
        *(pytest.param(shape, [1, 32, 64, 128], marks=pytest.mark.soak) for shape in (LLAMA_SMALL, LLAMA_7B, LLAMA_8B)),
    ],
)
def test_decode_steps_compile(shape: Shape, rows: list[int]) -> None:
    """Single operators do in tests/kernels/test_gpu_compiles.py."""
    bench = WithoutMemory(torch.device("meta"), torch.bfloat16, Rehearsal(), Sizes(cold_bytes=1))
    model = Model(bench, replace(shape, layers=LAYERS))
    with torch.no_grad(), launches_are_compiled() as found:
        for count in rows:
            step, adapters = DecodeStep(model, count, bench.sizes.contexts[0]), Adapters(model, count, bench.sizes.rank)
            model.decoder.use_lora(adapters.backend)
            step.logits(adapters.batch(list(range(count))))
    names = [kernel.name for kernel in found]
    assert {*names} >= {"lora_shrink", "lora_expand", "attend_pieces", "_add_norm_kernel", "_silu_multiply_kernel"}
    assert sum(name.startswith("lora_") for name in names) == len(rows) * LAYERS * 8
    for kernel in found:
        assert kernel.spilled_bytes <= SPILLED_BYTES, kernel.name
        assert kernel.shared_bytes + 1024 <= SHARED_BYTES, kernel.name
