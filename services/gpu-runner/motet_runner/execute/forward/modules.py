"""A loaded model, and its forward pass by its own modules: the reference for every other forward pass."""

from dataclasses import dataclass, field
from typing import Any

import torch

from motet.domain import KVShape
from motet_runner.execute.batch.flat_batch import CURRENT, FlatBatch
from motet_runner.execute.forward.protocol import Forward
from motet_runner.plan import LengthRope


@dataclass(slots=True)
class LoadedModel:
    model: Any
    config: Any
    shape: KVShape
    architecture: str
    vocabulary: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    linears: dict[str, torch.nn.Module] = field(default_factory=dict)
    """Linears that get exactly the rows of the iteration, by path."""
    linear_groups: list[tuple[str, ...]] = field(default_factory=list)
    """The same linears, grouped by their input tensor, such as q, k and v of a layer."""
    window: int | None = None
    """The widest window of the layers: a token attends to this number of tokens, itself included. None: a layer has no
    window."""
    keeps_all: bool = False
    """True if the model always computes the logits of all rows"""
    rope: LengthRope | None = None
    """Its rope, if the frequencies depend on the length of a sequence"""
    fused: Forward | None = None
    """The forward pass in the kernels that serve; None: the modules serve"""

    @property
    def windows(self) -> list[int]:
        """The windows of the layers that have one"""
        of_modules = (getattr(module, "motet_window", None) for module in self.model.modules())
        return [window for window in of_modules if window is not None]

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        """One model call over all rows of the iteration → logits [kept rows, vocabulary]"""
        batch.store.clear(batch.begun)
        if self.fused is not None:
            return self.fused(batch)
        token = CURRENT.set(batch)
        of_head = batch.keep if batch.head_rows is None else batch.head_rows
        try:
            output = self.model(
                input_ids=batch.input_ids, position_ids=batch.positions, use_cache=False, logits_to_keep=of_head
            )
        finally:
            CURRENT.reset(token)
        logits: torch.Tensor = output.logits[0]
        # Known after the first call: the probe keeps only some of its rows.
        self.keeps_all = self.keeps_all or len(logits) != len(of_head)
        return logits[batch.keep] if self.keeps_all or batch.head_rows is not None else logits
