"""The adapters with which forward passes are judged: their matrices, and a back end that adds them in a wider type."""

from collections.abc import Sequence

import torch

from motet_kernels import PlacedAdapter, Segment
from motet_runner.execute.adapters.lora_linears import LoraLinears
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.gate.texts import CHANGES_EVERY, RANKS
from motet_runner.execute.pack.linear_packing import weight_of

Matrices = dict[str, list[tuple[torch.Tensor, torch.Tensor] | None]]
"""Linear → A [rank, inputs] and B [outputs, rank] of each adapter; None: the adapter does not change this linear"""


class WideBackend:
    """Each adapter has its number as its name."""

    tile = 1
    copies = False

    def __init__(self, matrices: Matrices, lora: LoraLinears) -> None:
        self._matrices = matrices
        self.layout = lora.layout

    @staticmethod
    def order(adapter: PlacedAdapter) -> tuple[int, int]:
        return adapter.offset, 0

    @staticmethod
    def make_batch(segments: Sequence[Segment]) -> Sequence[Segment]:
        return segments

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, linear: str, batch: Sequence[Segment]) -> None:
        for segment in batch:
            changes = self._matrices[linear][int(segment.adapter.name)]
            rows = slice(segment.start, segment.stop)
            if changes is not None:
                y[rows] += x[rows] @ changes[0].t() @ changes[1].t()


def random_matrices(loaded: LoadedModel, lora: LoraLinears) -> Matrices:
    """Adapters whose results are as large as the linears' own. The matrices are rounded as in a run."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(loaded.device)

    layouts = [lora.layout(rank) for rank in RANKS]
    runs = [torch.zeros(layout.bytes, dtype=torch.uint8, device=loaded.device) for layout in layouts]
    matrices: Matrices = {}
    for place, (path, (inputs, outputs)) in enumerate(lora.shapes.items()):
        size = float(weight_of(loaded.linears[path])[:64].float().std())
        matrices[path] = []
        for rank, every, layout, run in zip(RANKS, CHANGES_EVERY, layouts, runs, strict=True):
            if place % every:
                matrices[path].append(None)
                continue
            layout.write(run, path, random(rank, inputs), random(outputs, rank), size / rank**0.5)
            a, b = layout.stored(run, path)
            matrices[path].append((a[:rank], b[:rank].t()))
    return matrices
