"""The back end of exact mode: right, and to the bit the same for a row whatever is beside it."""

from collections.abc import Sequence

import pytest
import torch

from motet_kernels import TILE_ROWS, ExactBackend, LinearGroup, PlacedAdapter, Segment, reference

INPUTS, OUTPUTS = 64, 48
RANKS = [8, 3, 16, 64, 1]
LINEAR = frozenset({"linear"})


class Adapters:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.random = lambda *shape: torch.randn(*shape, generator=generator)
        groups = [LinearGroup(INPUTS, {"linear": OUTPUTS, "other": OUTPUTS})]
        layout = ExactBackend(groups, torch.empty(0, dtype=torch.uint8), torch.float32).layout
        self.memory = torch.zeros(sum(layout(rank).bytes for rank in RANKS), dtype=torch.uint8)
        self.backend = ExactBackend(groups, self.memory, torch.float32)
        self.placed: list[PlacedAdapter] = []
        self.matrices: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
        begin = 0
        for index, rank in enumerate(RANKS):
            matrices = self.random(rank, INPUTS), self.random(OUTPUTS, rank), 0.5 + index
            layout(rank).write(self.memory[begin : begin + layout(rank).bytes], "linear", *matrices)
            self.matrices[str(index)] = matrices
            self.placed.append(PlacedAdapter(str(index), begin, layout(rank).rank, LINEAR))
            begin += layout(rank).bytes

    def add(self, y: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        y = y.clone()
        self.backend.add_lora(y, x, "linear", self.backend.make_batch(segments))
        return y


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 50])
def test_it_agrees_with_the_reference(rows: int) -> None:
    adapters = Adapters()
    x, y = adapters.random(rows, INPUTS), adapters.random(rows, OUTPUTS)
    owners = [None if row % 4 == 3 else row // 3 % len(RANKS) for row in range(rows)]
    segments = [Segment(row, row + 1, adapters.placed[owner]) for row, owner in enumerate(owners) if owner is not None]
    expected = reference.add_lora(y, x, segments, adapters.matrices)
    torch.testing.assert_close(adapters.add(y, x, segments).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_long_segment_goes_through_several_tiles() -> None:
    adapters = Adapters()
    x, y = adapters.random(60, INPUTS), adapters.random(60, OUTPUTS)
    segments = [Segment(5, 50, adapters.placed[2]), Segment(50, 53, adapters.placed[0])]
    expected = reference.add_lora(y, x, segments, adapters.matrices)
    torch.testing.assert_close(adapters.add(y, x, segments).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("owner", range(len(RANKS)))
def test_the_bits_of_a_row_do_not_depend_on_its_place_nor_on_the_others(owner: int) -> None:
    adapters = Adapters()
    x, y = adapters.random(1, INPUTS), adapters.random(1, OUTPUTS)
    alone = adapters.add(y, x, [Segment(0, 1, adapters.placed[owner])])
    for place in range(2 * TILE_ROWS):
        for mates in range(2):
            rows_x, rows_y = adapters.random(40, INPUTS), adapters.random(40, OUTPUTS)
            rows_x[place], rows_y[place] = x[0], y[0]
            others = [
                Segment(row, row + 1, adapters.placed[row % len(RANKS)]) for row in range(40) if mates and row != place
            ]
            added = adapters.add(rows_y, rows_x, [*others, Segment(place, place + 1, adapters.placed[owner])])
            assert torch.equal(added[place], alone[0])


def test_a_linear_that_an_adapter_does_not_change_is_left_alone() -> None:
    adapters = Adapters()
    x, y = adapters.random(4, INPUTS), adapters.random(4, OUTPUTS)
    after = y.clone()
    batch = adapters.backend.make_batch([Segment(0, 4, adapters.placed[0])])
    adapters.backend.add_lora(after, x, "other", batch)
    assert torch.equal(after, y)
