"""The linears that an adapter may change: which are fed the same tensor, and how their adapters lie in memory."""

from pathlib import Path

import pytest
import torch
import transformers

from motet_runner.execute.adapters.lora_linears import LoraLinears
from motet_runner.execute.kernels.roles import by_role
from motet_runner.execute.kernels.torch import torch_back_end
from motet_runner.execute.load import load_model as execute
from tests.runner.engines import make_engine
from tests.runner.families import GROUPED, SMALL
from tests.runner.random_models import save_base
from tests.support.device import DEVICE

SHARED = {
    "Llama": (transformers.LlamaConfig(**GROUPED), [3, 1, 2, 1]),
    "Gemma 3": (transformers.Gemma3TextConfig(**GROUPED, head_dim=16, query_pre_attn_scalar=16), [3, 1, 2, 1]),
    "Phi, whose attention and MLP run side by side": (transformers.PhiConfig(**SMALL), [4, 1, 1]),
    "GPT-NeoX, with q, k and v in one": (transformers.GPTNeoXConfig(**SMALL), [1, 1, 1, 1]),
}


@pytest.mark.parametrize("family", SHARED)
def test_linears_that_are_fed_the_same_tensor_are_found(family: str, tmp_path: Path) -> None:
    config, sizes = SHARED[family]
    loaded = execute.load(save_base(family, tmp_path / "base", config=config), "float32", DEVICE.type)
    assert [len(group) for group in loaded.linear_groups] == 2 * sizes, "two layers"
    assert sorted(path for group in loaded.linear_groups for path in group) == sorted(loaded.linears)
    if family == "Llama":
        names = [[path.rsplit(".", 1)[1] for path in group] for group in loaded.linear_groups[:4]]
        assert names == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def test_a_back_end_knows_the_groups_and_lays_their_matrices_together() -> None:
    kernels = by_role(torch_back_end(packed=False)).add_lora
    q, k, o = torch.nn.Linear(8, 16), torch.nn.Linear(8, 4), torch.nn.Linear(16, 8)
    linears = LoraLinears({"o": o, "q": q, "k": k}, torch.float32, kernels, groups=[("q", "k")])
    backend = linears.bind(kernels, torch.empty(0, dtype=torch.uint8), copy_bytes=0)
    layout = linears.layout(8)
    assert layout.bytes == linears.run_bytes(1) == backend.layout(1).bytes
    assert [list(group.outputs) for group in layout.groups] == [["o"], ["q", "k"]]
    assert layout.offsets["k"][0] == layout.offsets["q"][0] + layout.rank * 8 * 4


def test_an_engine_knows_the_groups_of_its_model(llama: Path) -> None:
    engine = make_engine(llama)
    groups = [
        [path.rsplit(".", 1)[1] for path in group.outputs] for group in engine.diagnostics.linears.layout(8).groups
    ]
    assert groups[:4] == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def test_a_load_multiplies_with_a_linear_whose_weights_are_packed_at_this_moment() -> None:
    linear = torch.nn.Linear(8, 4)
    weight = linear.weight.detach().clone()

    def packed(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, linear.bias)

    def old(x: torch.Tensor) -> torch.Tensor:
        linear.forward = packed
        linear.weight = torch.nn.Parameter(weight.new_empty(0))
        return torch.nn.functional.linear(x, linear.weight, linear.bias)

    linear.forward = old
    linears = LoraLinears({"o": linear}, torch.float32, by_role(torch_back_end(packed=False)).add_lora)
    linears.follow()
    with torch.inference_mode():
        x = torch.randn(3, 8)
        base = linears.base("o")
        torch.testing.assert_close(base.multiply(x), x @ weight.t())
        linears.follow()
        torch.testing.assert_close(base.multiply(x), x @ weight.t())
