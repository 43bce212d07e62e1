"""Routers send tokens to the experts of the truth, whatever computes.

Where a router finds two experts nearly alike, rounding decides between them, and its token then differs by far more
than rounding. The weight that each expert gets stays what was computed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_DECIDE = frozenset({torch.ops.aten.topk.default, torch.ops.aten.max.dim, torch.ops.aten.gt.Scalar})
"""The operators with which routers choose experts, or leave some out"""
_NUMBERS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def experts_of(config: Any) -> int:
    """Their number, as the model's configuration names it; 0 if it has none"""
    return next((number for name in _NUMBERS if (number := getattr(config, name, None))), 0)


class SameExperts:
    def __init__(self, tokens: int, experts: int) -> None:
        """`tokens`: of all texts. `experts`: of a router"""
        self._tokens = tokens
        self._experts = experts
        self._decided: list[torch.Tensor] = []
        """[tokens, …] by each operator, in the order of their calls"""

    @contextmanager
    def noted(self, places: torch.Tensor) -> Iterator[None]:
        """The truth is computed for these tokens."""
        with _Decisions(places, self._experts, self._note):
            yield

    @contextmanager
    def followed(self, places: torch.Tensor) -> Iterator[None]:
        """These tokens are computed, for which the truth is known."""
        if not self._decided:
            yield
            return
        with _Decisions(places, self._experts, self._follow):
            yield

    def _note(self, number: int, places: torch.Tensor, decided: torch.Tensor) -> torch.Tensor:
        if number == len(self._decided):
            self._decided.append(decided.new_zeros((self._tokens, decided.shape[-1])))
        self._decided[number][places] = decided.flatten(0, -2)
        return decided

    def _follow(self, number: int, places: torch.Tensor, decided: torch.Tensor) -> torch.Tensor:
        return self._decided[number][places].view_as(decided)


class _Decisions(TorchDispatchMode):
    def __init__(
        self, places: torch.Tensor, experts: int, instead: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._places = places
        self._experts = experts
        self._instead = instead
        self._number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _DECIDE:
            return result
        scores, decided = args[0], result[1] if isinstance(result, tuple) else result
        if not decided.dim() or decided.dim() != scores.dim():
            return result  # it decides something else
        if decided.numel() != len(self._places) * decided.shape[-1]:
            return result
        if func is torch.ops.aten.gt.Scalar and decided.shape[-1] != self._experts:
            return result  # not of experts: activations compare, too
        self._number += 1
        decided = self._instead(self._number - 1, self._places, decided)
        return (scores.gather(-1, decided), decided) if isinstance(result, tuple) else decided
