"""Rope whose frequencies depend on a length, computed per sequence (see `plan.length_rope`).

The model's own module computes the frequencies, with the largest position of a call as the length. So one call computes
all rows of equal length, and one extra position stands for this length.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from motet.errors import ModelFolderError
from motet_runner.execute.batch.flat_batch import CURRENT, FlatBatch
from motet_runner.plan import LengthRope
from motet_runner.supported_models import PER_CALL_ROPE, ropes_of

Rotations = tuple[torch.Tensor, ...]
"""Cosines and sines, [1, rows, dim]"""


def length_rope(config: Any) -> tuple[LengthRope, float] | None:
    """The model's rope, and its context as a multiple of the configured one; None for other types."""
    raw = config.to_dict()
    found = [rope for rope in ropes_of(raw) if rope.get("rope_type") in PER_CALL_ROPE]
    if not found:
        return None
    kinds = {
        (rope["rope_type"], rope.get("original_max_position_embeddings", config.max_position_embeddings))
        for rope in found
    }
    if len(kinds) > 1:
        raise ModelFolderError("not yet: layers with several rope types whose frequencies depend on a length.")
    ((kind, original),) = kinds
    if kind == "longrope":
        return LengthRope(original, grows=False), 1.0
    return LengthRope(config.max_position_embeddings, grows=True), float(found[0]["factor"])


def compute_per_sequence(model: torch.nn.Module, rope: LengthRope) -> list["PerSequence"]:
    """Replace the `forward` of each module that computes such a rope."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if set(kinds.values() if isinstance(kinds, dict) else [kinds]) & set(PER_CALL_ROPE):
            module.forward = PerSequence(module.forward, rope)
            found.append(module.forward)
    return found


class PerSequence:
    """Replaces the `forward` of a module."""

    def __init__(self, forward: Callable[..., Rotations], rope: LengthRope) -> None:
        self.calls = 0
        self._forward = forward
        self._rope = rope

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, *others: Any, **options: Any) -> Rotations:
        self.calls += 1
        lengths = _lengths(CURRENT.get(), self._rope)
        different = np.unique(lengths)
        if len(different) == 1:
            return self._of_length(x, position_ids, int(different[0]), *others, **options)
        together: list[torch.Tensor] = []
        for length in different.tolist():
            rows = torch.from_numpy(np.flatnonzero(lengths == length)).to(position_ids.device)
            parts = self._of_length(x, position_ids[:, rows], length, *others, **options)
            if not together:
                together = [part.new_empty(1, len(lengths), part.shape[-1]) for part in parts]
            for whole, part in zip(together, parts, strict=True):
                whole[:, rows] = part
        return tuple(together)

    def _of_length(
        self, x: torch.Tensor, positions: torch.Tensor, length: int, *others: Any, **options: Any
    ) -> Rotations:
        if self._rope.grows:  # the module keeps the longest call's frequencies until a short call resets them
            self._forward(x, positions.new_zeros(1, 1), *others, **options)
        standing_in = positions.new_full((1, 1), length - 1)
        rotations = self._forward(x, torch.cat((positions, standing_in), dim=1), *others, **options)
        return tuple(rotation[:, :-1] for rotation in rotations)


def _lengths(batch: FlatBatch, rope: LengthRope) -> np.ndarray:
    """[rows] the length on which each row's frequencies depend, at least the original context."""
    line = batch.line
    lengths: np.ndarray
    if rope.grows:
        of_prompts = np.array([row.prompt_tokens for row in line.rows])[line.sequence_of]
        lengths = np.maximum(np.maximum(of_prompts, line.positions + 1), rope.original)
        return lengths
    long = np.array([len(row.tokens) > rope.original for row in line.rows])[line.sequence_of]
    lengths = np.where(long, rope.original + 1, rope.original)
    return lengths
