"""Adds adapters to the modules of a model with a back end that does not serve: for trials beside the engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from motet_kernels import LoraBackend
from motet_runner.execute.batch.flat_batch import FlatBatch
from motet_runner.execute.forward.modules import LoadedModel


@contextmanager
def added(loaded: LoadedModel, backend: LoraBackend[Any], batch: FlatBatch) -> Iterator[None]:
    """While the block runs, this back end adds LoRA to the modules' linears, and the engine's back end does not. A
    fused forward pass adds LoRA by itself."""
    if loaded.fused is not None:
        yield
        return
    lora, batch.lora = batch.lora, None

    def add(path: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def followed(_: torch.nn.Module, given: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
            backend.add_lora(y.view(-1, y.shape[-1]), given[0].reshape(-1, given[0].shape[-1]), path, lora)

        return followed

    hooks = []
    if lora is not None:
        hooks = [module.register_forward_hook(add(path)) for path, module in loaded.linears.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
