"""The test of a GPU's kernels on the model that they are to serve, before they do: attention and add_lora compute what
torch computes. Compilers and drivers differ from machine to machine; the answers must not.

A model's fused forward is tested when it is made (see `packed_model`).
"""

import torch

from motet_kernels import LinearGroup, PlacedAdapter, Segment
from motet_kernels.reference import add_lora
from motet_runner.execute.kernels import Kernels
from motet_runner.execute.lora import features
from motet_runner.execute.model import TOLERANCE, LoadedModel, probe_logits, tolerance_of

RANKS = (8, 24)
"""Of the adapters in the test"""


def fault_of(loaded: LoadedModel, kernels: Kernels) -> str:
    """Why these kernels cannot serve this model; empty if they can."""
    try:
        with torch.inference_mode():
            if difference := _lora_differs(loaded, kernels):
                return f"add_lora gives other numbers (by {difference:.2g})"
            expected = probe_logits(loaded)
            difference = float((probe_logits(loaded, kernels.attention) - expected).abs().max())
    except Exception as error:  # compilers and drivers raise what they like
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if not difference <= tolerance_of(expected):
        return f"attention gives other logits (by {difference:.2g})"
    return ""


def _lora_differs(loaded: LoadedModel, kernels: Kernels) -> float:
    """By how much, with the linears of the model's first group; 0 if by no more than rounding"""
    if not loaded.linear_groups:
        return 0.0
    device, dtype = loaded.device, loaded.dtype
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(device, dtype)

    shapes = {path: features(loaded.linears[path]) for path in loaded.linear_groups[0]}
    outputs = {path: shape[1] for path, shape in shapes.items() if shape is not None}
    inputs = next(shape[0] for shape in shapes.values() if shape is not None)
    group = LinearGroup(inputs, outputs)
    layouts = [
        kernels.lora([group], torch.empty(0, dtype=torch.uint8, device=device), dtype, 0).layout(r) for r in RANKS
    ]
    memory = torch.zeros(sum(layout.bytes for layout in layouts), dtype=torch.uint8, device=device)
    backend = kernels.lora([group], memory, dtype, 0)
    matrices: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor, float]]] = {path: {} for path in outputs}
    placed = []
    offset = 0
    for rank, layout in zip(RANKS, layouts, strict=True):
        name = str(rank)
        for path, width in outputs.items():
            a, b = random(rank, inputs) / inputs**0.5, random(width, rank) / rank**0.5
            matrices[path][name] = (a, b, 2.0)
            layout.write(memory[offset : offset + layout.bytes], path, a, b, 2.0)
        placed.append(PlacedAdapter(name, offset, layout.rank, frozenset(outputs)))
        offset += layout.bytes
    segments = [Segment(0, 1, placed[1]), Segment(1, 4, placed[0])]
    batch = backend.make_batch(segments)
    for path, width in outputs.items():
        x, y = random(5, inputs), random(5, width)
        expected = add_lora(y, x, segments, matrices[path])
        backend.add_lora(y, x, path, batch)
        difference = float((y.double() - expected).abs().max())
        if not difference <= TOLERANCE[dtype] * max(1.0, float(expected.abs().max())):
            return difference
    return 0.0
