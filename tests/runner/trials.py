"""A model tried without an engine: brought to kernels, and the logits of a few sequences."""

from collections.abc import Collection

import torch

from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.program import SWITCHED_ON
from motet_runner.execute.forward.trial import MakeAttention, Trial, text
from motet_runner.execute.gate.gate import Gate
from motet_runner.execute.kernels.packed_model import PackedModel
from motet_runner.execute.kernels.roles import Kernels

FIRST, SECOND = (
    text(count, stride=stride, first=first, vocabulary=997) for count, stride, first in ((21, 7, 3), (6, 11, 5))
)


def probe_logits(loaded: LoadedModel, paged: MakeAttention | None = None) -> torch.Tensor:
    """Last logits of a few sequences: packed together, and the first one in two parts and token by token."""
    first, second = ([token % loaded.vocabulary for token in tokens] for tokens in (FIRST, SECOND))
    rows = []
    for texts, before in (([second, first], (0, 0)), ([first], (17,)), ([first, second], (20, 3))):
        trial = Trial(loaded, texts, attention=paged)
        begun = {row: count for row, count in enumerate(before) if count}
        if begun:
            trial.logits(begun)
        left = trial.logits({row: len(tokens) - before[row] for row, tokens in enumerate(texts)})
        rows += [left[row][-1] for row in range(len(texts))]
    return torch.stack(rows)


def pack(loaded: LoadedModel, kernels: Kernels, switched_on: Collection[str] = SWITCHED_ON) -> None:
    """Bring a model to these kernels, all parts at once."""
    packed = PackedModel(loaded, kernels, Gate(loaded), switched_on)
    with torch.inference_mode():
        for _ in packed.parts():
            pass
    loaded.fused = packed.fused
