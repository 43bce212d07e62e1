"""What transformers and PEFT compute, one adapter at a time, and what it is to compute the same.

Fed the reference's tokens, every logit within 1e-4 in fp32, and the same greedy choice except where the reference's two
best are within 1e-4 of each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from motet.domain import BASE, Digest, RequestId
from tests.runner.families import pretrained

NEAR_TIE = 1e-4
NEAR_TIES_AT_MOST = 0.005


@dataclass
class World:
    family: str
    base: Path
    adapters: dict[Digest, Path]


@dataclass
class Served:
    request: RequestId
    adapter: Digest
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def reference_logits(world: World, served: Sequence[Served]) -> dict[RequestId, torch.Tensor]:
    """What transformers and PEFT say, adapter by adapter, fed the very tokens that were served."""
    from peft import PeftModel

    logits = {}
    for adapter in {one.adapter for one in served}:
        model = pretrained(world.base)
        if adapter != BASE:
            model = PeftModel.from_pretrained(model, str(world.adapters[adapter]))
        model.eval()
        for one in served:
            if one.adapter == adapter:
                with torch.inference_mode():
                    everything = model(torch.tensor([[*one.prompt, *one.tokens[:-1]]])).logits[0]
                logits[one.request] = everything[len(one.prompt) - 1 :]
    return logits


def assert_equal(served: Sequence[Served], expected: dict[RequestId, torch.Tensor]) -> str:
    """→ how equal, for people"""
    near_ties = positions = 0
    worst = 0.0
    for one in served:
        ours, theirs = torch.stack(one.logits).cpu(), expected[one.request]
        worst = max(worst, float((ours - theirs).abs().max()))
        best = theirs.topk(2, dim=-1)
        for token, (first, second), (choice, _) in zip(one.tokens, best.values, best.indices, strict=True):
            positions += 1
            if first - second < NEAR_TIE:
                near_ties += 1
            else:
                assert token == choice
    assert worst <= 1e-4
    assert near_ties / positions <= NEAR_TIES_AT_MOST
    return f"largest |Δ logit| {worst:.1e}, near ties {near_ties} of {positions} positions"
