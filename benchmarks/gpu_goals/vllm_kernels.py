"""vLLM's Triton kernels for LoRA as a baseline, from a folder that the caller has brought: they are no part of this
repository. The folder is vLLM's `vllm/lora/ops/triton_ops`, or a copy of the files below.

What these files import of the rest of vLLM is replaced by a few stand-ins. None of them runs on the device.
"""

import importlib
import inspect
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton

from benchmarks.harness import Do
from benchmarks.lora_baselines import Product

FILES = ("kernel_utils.py", "lora_expand_op.py", "lora_kernel_metadata.py", "lora_shrink_op.py", "utils.py")
PACKAGE = "vllm.lora.ops.triton_ops"


def lacking(folder: Path) -> list[str]:
    return [name for name in FILES if not (folder / name).is_file()]


class _Settings(ModuleType):
    """Of vLLM: all are off, but the one that makes its results independent of the batch."""

    def __init__(self, *, invariant: bool) -> None:
        super().__init__("vllm.envs")
        self.VLLM_BATCH_INVARIANT = invariant

    def __getattr__(self, name: str) -> Any:
        if name.startswith("VLLM_"):
            return None
        raise AttributeError(name)


class _Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Platform:
    """It says no to every question: the defaults of the kernels stay."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: False


def _no_custom_op(*_: Any, **__: Any) -> None:
    raise AttributeError("the functions are called as they are")


def _to_device(data: Any, device: Any = None, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return torch.as_tensor(data, dtype=dtype, device=device)


def _stand_ins(folder: Path, *, invariant: bool) -> dict[str, ModuleType]:
    def module(name: str, **contents: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(contents)
        made.__path__ = []
        return made

    envs = _Settings(invariant=invariant)
    op = {"direct_register_custom_op": _no_custom_op, "async_tensor_h2d": _to_device}
    power = {"next_power_of_2": triton.next_power_of_2}
    modules = [
        module("vllm", envs=envs),
        module("vllm.utils", **op, **power),
        module("vllm.utils.torch_utils", **op),
        module("vllm.utils.math_utils", **power),
        module("vllm.logger", init_logger=lambda _: _Silent()),
        module("vllm.platforms", current_platform=_Platform()),
        module("vllm.triton_utils", triton=triton, tl=importlib.import_module("triton.language")),
        module("vllm.model_executor"),
        module("vllm.model_executor.layers"),
        module(
            "vllm.model_executor.layers.batch_invariant",
            vllm_is_batch_invariant=lambda: invariant,
        ),
        module("vllm.lora"),
        module("vllm.lora.ops"),
        module(PACKAGE),
    ]
    found = {one.__name__: one for one in modules} | {"vllm.envs": envs}
    found[PACKAGE].__path__ = [str(folder)]
    return found


class VllmKernels:
    def __init__(self, folder: Path, *, invariant: bool = False) -> None:
        """`invariant`: results that do not depend on the rest of the batch"""
        before = {name: one for name, one in sys.modules.items() if name.partition(".")[0] == "vllm"}
        for name in before:
            del sys.modules[name]
        sys.modules.update(_stand_ins(folder, invariant=invariant))
        try:
            shrink = importlib.import_module(f"{PACKAGE}.lora_shrink_op")
            self._shrink = shrink.lora_shrink
            self._expand = importlib.import_module(f"{PACKAGE}.lora_expand_op").lora_expand
            self._meta = importlib.import_module(f"{PACKAGE}.lora_kernel_metadata").LoRAKernelMeta
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
                del sys.modules[name]
            sys.modules.update(before)
        self._zeroes = "output_tensor.zero_()" in inspect.getsource(shrink)

    def batch(self, owners: Sequence[int], adapters: int, device: torch.device) -> tuple[Any, ...]:
        """What both kernels are told of the rows. -1: no adapter."""
        meta = self._meta.make(adapters, len(owners), device)
        meta.prepare_tensors(torch.tensor(owners, dtype=torch.int32, device=device))
        more = {"specialize_active_lora": True} if "specialize_active_lora" in _parameters(meta.meta_args) else {}
        arguments: tuple[Any, ...] = meta.meta_args(len(owners), **more)
        return arguments

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        v: torch.Tensor,
        matrices: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        batch: tuple[Any, ...],
    ) -> None:
        """`v` [linears, rows, rank] fp32; `matrices`: A [adapters, 1, rank, inputs] and B [adapters, 1, outputs, rank]
        of each linear, whose columns lie side by side in y."""
        a, b = matrices
        if not self._zeroes:
            v.zero_()
        self._shrink(x, list(a), v, *batch, 1.0)
        self._expand(v, list(b), y, *batch, offset_start=0, add_inputs=True)

    def way(self, product: Product) -> Do:
        """As the other baselines of the operator (`benchmarks.lora_baselines`). Adapters of small ranks are padded."""
        case, x, y = product.case, product.x, product.y
        rank = max(case.ranks)
        v = torch.empty(1, len(case.owners), rank, dtype=torch.float32, device=x.device)
        batch = self.batch(case.owners, len(case.ranks), x.device)
        following = itertools.cycle([padded(of_set, rank) for of_set in product.sets])
        return lambda: self.add(y, x, v, next(following), batch)


def padded(
    of_set: Sequence[tuple[torch.Tensor, torch.Tensor]], rank: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """From Aᵀ [rank, inputs] and B [rank, outputs] of each adapter"""
    (first_a, first_b), adapters = of_set[0], len(of_set)
    a = first_a.new_zeros(adapters, 1, rank, first_a.shape[1])
    b = first_b.new_zeros(adapters, 1, first_b.shape[1], rank)
    for number, (one_a, one_b) in enumerate(of_set):
        a[number, 0, : one_a.shape[0]] = one_a
        b[number, 0, :, : one_b.shape[0]] = one_b.t()
    return [a], [b]


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)
