"""Makes routers send each token to the same experts as in the truth.

Rounding decides between nearly equal experts, and another expert changes a token's result by far more than rounding.
The weights of the experts stay as computed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_DIMENSION = {torch.ops.aten.topk.default: 2, torch.ops.aten.max.dim: 1, torch.ops.aten.gt.Scalar: None}
"""Operator with which routers choose or skip experts → the index of its argument for the dimension"""
_NUMBERS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "n_group")
"""Configurations' names for the numbers of experts, and of groups of experts: some routers choose groups first"""


def choices_of(config: Any) -> frozenset[int]:
    """The numbers of experts or groups among which routers choose. Empty if the model has no experts"""
    found = set()
    for part in (config, *vars(config).values()):  # some families describe their feed-forward layers one level down
        for number in (getattr(part, name, None) for name in _NUMBERS):
            if isinstance(number, int) and number:
                found |= {number, number + (getattr(part, "zero_expert_num", None) or 0)}  # zero experts do nothing
    return frozenset(found)


class SameExperts:
    def __init__(self, tokens: int, choices: frozenset[int]) -> None:
        """`tokens`: the tokens of all texts. `choices`: see `choices_of`"""
        self._tokens = tokens
        self._choices = choices
        self._decided: list[torch.Tensor] = []
        """[tokens, …] the decisions of each operator call, in order"""

    @contextmanager
    def noted(self, places: torch.Tensor) -> Iterator[None]:
        """Notes the decisions while the truth of these tokens is computed."""
        with _Decisions(places, self._choices, self._note):
            yield

    @contextmanager
    def followed(self, places: torch.Tensor) -> Iterator[None]:
        """Repeats the truth's decisions while these tokens are computed."""
        if not self._decided:
            yield
            return
        with _Decisions(places, self._choices, self._follow):
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
        self,
        places: torch.Tensor,
        choices: frozenset[int],
        instead: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._places = places
        self._choices = choices
        self._instead = instead
        self._number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _DIMENSION:
            return result
        scores, decided = args[0], result[1] if isinstance(result, tuple) else result
        if not decided.dim() or decided.dim() != scores.dim() or scores.shape[-1] not in self._choices:
            return result  # not a router's decision: other operators compare, too
        if not _of_rows(scores, args, _DIMENSION[func]) or decided.numel() != len(self._places) * decided.shape[-1]:
            return result
        self._number += 1
        decided = self._instead(self._number - 1, self._places, decided)
        return (scores.gather(-1, decided), decided) if isinstance(result, tuple) else decided


def _of_rows(scores: torch.Tensor, args: Any, dimension: int | None) -> bool:
    """True if an operator decides each row by itself"""
    return dimension is None or len(args) <= dimension or args[dimension] in (-1, scores.dim() - 1)
