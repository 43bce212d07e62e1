"""All that `benchmarks.gpu` launches of our own compiles for a card, at its real sizes, before there is one."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu_goals.attention import Decodes
from benchmarks.gpu_goals.bench import Bench, Sizes
from benchmarks.gpu_goals.clock import Rehearsal
from benchmarks.gpu_goals.models import LLAMA_7B, LLAMA_8B, Adapters, DecodeStep, Model, Shape
from benchmarks.gpu_goals.operator import Operator
from benchmarks.gpu_goals.served import LLAMA_SMALL
from benchmarks.lora_baselines import Case
from tests.support.gpu_compiler import SPILLED_BYTES, Compiled, launches_are_compiled

SHARED_BYTES = 227 * 1024
LAYERS = 2
"""Kernels are compiled once for all layers."""


class WithoutMemory(Bench):
    """Tensors have sizes and no numbers, so that a whole model costs nothing."""

    def __post_init__(self) -> None:
        self.generator = None


@pytest.fixture
def bench() -> Bench:
    return WithoutMemory(torch.device("meta"), torch.bfloat16, Rehearsal(), Sizes(cold_bytes=1))


def check(found: list[Compiled], *names: str) -> None:
    assert {kernel.name for kernel in found} >= set(names)
    for kernel in found:
        assert kernel.spilled_bytes <= SPILLED_BYTES, kernel.name
        assert kernel.shared_bytes + 1024 <= SHARED_BYTES, kernel.name


@pytest.mark.parametrize(
    "shape", [LLAMA_SMALL, *(pytest.param(shape, marks=pytest.mark.soak) for shape in (LLAMA_7B, LLAMA_8B))]
)
def test_decode_steps(bench: Bench, shape: Shape) -> None:
    model = Model(bench, replace(shape, layers=LAYERS))
    with torch.no_grad(), launches_are_compiled() as found:
        for rows in (1, 32, 64, 128):
            step, adapters = DecodeStep(model, rows, bench.sizes.contexts[0]), Adapters(model, rows, bench.sizes.rank)
            model.decoder.use_lora(adapters.backend)
            step.logits(adapters.batch(list(range(rows))))
    check(found, "lora_shrink", "lora_expand", "attend_pieces", "_add_norm_kernel", "_silu_multiply_kernel")
    of_lora = [kernel for kernel in found if kernel.name.startswith("lora_")]
    assert len(of_lora) == 4 * LAYERS * 8


@pytest.mark.parametrize("outputs", [Sizes().width, pytest.param(Sizes().wide, marks=pytest.mark.soak)])
def test_operators(bench: Bench, outputs: int) -> None:
    sizes = bench.sizes
    with launches_are_compiled() as found:
        for rows in (*sizes.rows, sizes.many_rows):
            for rank in sizes.ranks:
                Operator(bench, sizes.width, outputs, Case(list(range(rows)), [rank] * rows)).ours()()
    check(found, "lora_shrink", "lora_expand")
    assert len({kernel.key for kernel in found}) == 2, "one of each, whatever rows and ranks"


@pytest.mark.parametrize("kv_heads", Sizes().kv_heads)
@pytest.mark.parametrize("page_tokens", [16, pytest.param(64, marks=pytest.mark.soak)])
def test_attention(bench: Bench, kv_heads: int, page_tokens: int) -> None:
    sizes = bench.sizes
    with launches_are_compiled() as found:
        for context in sizes.contexts:
            Decodes(bench, sizes.heads, kv_heads, [context] * sizes.sequences).ours(page_tokens)()
        Decodes(bench, sizes.heads, kv_heads, [sizes.one_context]).ours(page_tokens)()
    check(found, "attend_pieces", "add_pieces")
