"""A gate for tests that are not about the gate: most of the time that an engine of a tiny model takes to start is spent
on its judgement, and on the checks of the model, of its packed weights and of the compiled kernels."""

from collections.abc import Generator, Iterator, Sequence
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from motet_kernels.cpp import Library
from motet_kernels.cpp.self_test import check
from motet_kernels.decoder_weights import PackedLinears
from motet_runner.engine import Engine
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.protocol import Forward
from motet_runner.execute.gate.allowed_error import linear_fault
from motet_runner.execute.gate.gate import Gate
from motet_runner.execute.kernels.roles import Kernels
from motet_runner.execute.load.model_check import ModelCheck
from motet_runner.interface import EngineConfig


def started(config: EngineConfig, **settings: Any) -> Engine:
    """An engine of the product, with this gate and these checks."""
    with (
        patch("motet_runner.engine.Gate", JudgedOnce),
        patch("motet_runner.execute.load.load_model.ModelCheck", CheckedOnce),
        patch("motet_runner.execute.kernels.packed_model.linear_fault", fault_found_once),
        patch("motet_kernels.cpp.builder.check", check_once),
    ):
        return Engine(config, **settings)


_Judgement = tuple[object, ...]
"""What is judged: a model, kernels, numbers of threads, and whether these kernels compute the whole forward pass"""


class JudgedOnce(Gate):
    """What has passed in this process passes again."""

    passed: ClassVar[set[_Judgement]] = set()
    remembers: ClassVar[bool] = True
    """False in tests that are about the gate or the change of kernels"""

    def __init__(self, loaded: LoadedModel, *, threads: Sequence[int] = ()) -> None:
        super().__init__(loaded, threads=threads)
        self._of_model = loaded.config.to_json_string(), loaded.dtype, loaded.device, *threads

    def prepare(self, kernels: Kernels) -> Iterator[None]:  # type: ignore[override] # the product calls it so
        wholes = (True, False) if kernels.compiled else (True,)
        if not all(self._has_passed(self._judgement(kernels, whole=whole)) for whole in wholes):
            yield from super().prepare(kernels)

    def fault_of_forward(  # type: ignore[override]
        self, kernels: Kernels, fused: Forward | None
    ) -> Generator[None, None, str]:
        judgement = self._judgement(kernels, whole=fused is not None)
        if self._has_passed(judgement):
            return ""
        fault = yield from super().fault_of_forward(kernels, fused)
        if not fault:
            self.passed.add(judgement)
        return fault

    def _has_passed(self, judgement: _Judgement) -> bool:
        return self.remembers and judgement in self.passed

    def _judgement(self, kernels: Kernels, *, whole: bool) -> _Judgement:
        library = kernels.library
        return *self._of_model, kernels.name, None if library is None else library.path, whole


class CheckedOnce(ModelCheck):
    """Of a model whose like has passed, only what its linears and layers are is found out."""

    passed: ClassVar[set[_Judgement]] = set()

    def run(self) -> None:
        of = self._loaded
        like = of.config.to_json_string(), of.architecture, of.dtype, of.device
        self._knows = JudgedOnce.remembers and like in self.passed
        super().run()
        self.passed.add(like)

    def _check_neighbours(self, tokens: list[int]) -> None:
        if not self._knows:
            super()._check_neighbours(tokens)

    def _check_parts(self, exact: LoadedModel, tokens: list[int]) -> torch.Tensor:
        return torch.empty(0) if self._knows else super()._check_parts(exact, tokens)

    def _check_attention(self, exact: LoadedModel, tokens: list[int], expected: torch.Tensor) -> None:
        if not self._knows:
            super()._check_attention(exact, tokens, expected)


_right: set[object] = set()


def fault_found_once(weights: Sequence[torch.Tensor], packed: PackedLinears) -> str:
    """Packed weights of a kind, type and shape whose products have been right are right again."""
    kind = type(packed), weights[0].dtype, weights[0].device, *(weight.shape for weight in weights)
    if JudgedOnce.remembers and kind in _right:
        return ""
    fault = linear_fault(weights, packed)
    if not fault:
        _right.add(kind)
    return fault


def check_once(library: Library) -> None:
    if not JudgedOnce.remembers or library.path not in _right:
        check(library)
        _right.add(library.path)
