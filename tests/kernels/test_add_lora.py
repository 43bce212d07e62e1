"""add_lora against its fp64 oracle, on traffic with names."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_kernels import RANKS, LinearGroup, Segment, TorchBackend, rank_class_of, reference, rows_of
from motet_kernels.lora_batch import make_batch

TRAFFIC = {
    "nobody": lambda rows: [None] * rows,
    "one tenant": lambda rows: [0] * rows,
    "every row its own": lambda rows: list(range(rows)),
    "two in turns": lambda rows: [row % 2 for row in range(rows)],
    "zipf": lambda rows: [int(40 / (1 + row)) % 7 for row in range(rows)],
    "one giant, many tiny": lambda rows: [0] * max(0, rows - 5) + [1, 2, 3, 4, 5][:rows],
    "every other one is the base": lambda rows: [row // 2 if row % 2 else None for row in range(rows)],
}
RANK_OF = [8, 3, 16, 64, 1, 12, 32, 100, 8, 5]


class Linear(TorchBackend):
    """The back end of a model with one linear. Adapters are written as PEFT saves them."""

    def __init__(self, inputs: int, outputs: int, rows: int, dtype=torch.float32) -> None:
        super().__init__([LinearGroup(inputs, {"linear": outputs})], rows, dtype, "cpu")

    def load(self, rank_class: int, slot: int, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> None:
        layout = self.layout(a.shape[0])
        run = torch.zeros(layout.bytes, dtype=torch.uint8)
        layout.write(run, "linear", a, b, scale)
        self.write("linear", (rank_class, slot), *layout.matrices(run, "linear"))

    def add(self, y: torch.Tensor, x: torch.Tensor, segments: list[Segment]) -> None:
        self.add_lora(y, x, "linear", self.make_batch(segments))


class Projection:
    """Adapters of mixed ranks on one projection, and rows that go through them."""

    def __init__(self, inputs: int, outputs: int, adapters: int, dtype=torch.float32, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.random = lambda *shape: torch.randn(*shape, generator=generator)
        self.matrices = {}
        self.places = []
        self.backend = Linear(inputs, outputs, adapters * RANKS[rank_class_of(max(RANK_OF))], dtype)
        taken = 0
        for index in range(adapters):
            rank, scale = RANK_OF[index % len(RANK_OF)], 0.5 + index % 3
            rank_class = rank_class_of(rank)
            slot = -(-taken // RANKS[rank_class])
            taken = rows_of((rank_class, slot)).stop
            a, b = self.random(rank, inputs) / inputs**0.5, self.random(outputs, rank)
            self.backend.load(rank_class, slot, a, b, scale)
            self.matrices[rank_class, slot] = a, b, scale
            self.places.append((rank_class, slot))

    def segments(self, owners: list[int | None]) -> list[Segment]:
        return [Segment(*self.places[owner], row, row + 1) for row, owner in enumerate(owners) if owner is not None]


@pytest.mark.parametrize("rows", [1, 7, 64, 133])
@pytest.mark.parametrize("traffic", TRAFFIC)
@pytest.mark.parametrize("shape", [(48, 80), (64, 16)], ids=str)
def test_matches_the_reference(traffic: str, rows: int, shape: tuple[int, int]) -> None:
    projection = Projection(*shape, adapters=140 if traffic == "every row its own" else 70)
    segments = projection.segments(TRAFFIC[traffic](rows))
    x, y = projection.random(rows, shape[0]), projection.random(rows, shape[1])
    expected = reference.add_lora(y, x, segments, projection.matrices)
    projection.backend.add(y, x, segments)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


@given(
    owners=st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=1, max_size=60),
    inputs=st.integers(1, 33),
    outputs=st.integers(1, 33),
)
@settings(deadline=None, max_examples=60)
def test_matches_the_reference_in_any_order_and_size(owners: list[int | None], inputs: int, outputs: int) -> None:
    projection = Projection(inputs, outputs, adapters=10)
    segments = projection.segments(owners)
    x, y = projection.random(len(owners), inputs), projection.random(len(owners), outputs)
    expected = reference.add_lora(y, x, segments, projection.matrices)
    projection.backend.add(y, x, segments)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


def test_rows_without_an_adapter_are_not_touched_at_all() -> None:
    projection = Projection(32, 32, adapters=4)
    owners = [None, 0, None, 1, 1, None]
    x, y = projection.random(6, 32), projection.random(6, 32)
    x[[0, 2, 5]] = float("nan")
    y[[0, 2, 5]] = float("nan")
    before = y.clone()
    projection.backend.add(y, x, projection.segments(owners))
    assert y[[0, 2, 5]].isnan().all()
    assert not y[[1, 3, 4]].isnan().any()
    assert (y[[1, 3, 4]] != before[[1, 3, 4]]).any()


def test_a_row_that_is_not_finite_affects_no_other_row() -> None:
    """Blocks are padded; the padding of one adapter's block must not carry another's trouble."""
    projection = Projection(32, 32, adapters=10)
    owners = [0, 0, 0, 8, 8, 1]  # 0 and 8 share a rank class, with three rows and two
    x, y = projection.random(6, 32), projection.random(6, 32)
    x[0] = float("inf")
    projection.backend.add(y, x, projection.segments(owners))
    assert y[1:].isfinite().all()


def test_many_rows_of_one_adapter_are_one_product_and_few_share_one() -> None:
    batch = make_batch(
        [Segment(0, 0, 0, 512), Segment(0, 1, 512, 513), Segment(0, 3, 513, 514), Segment(1, 0, 514, 516)]
    )
    assert batch.long == [Segment(0, 0, 0, 512), Segment(1, 0, 514, 516)]  # the second is alone in its class
    assert [(short.rank_class, short.slots, short.width) for short in batch.short] == [(0, (1, 3), 1)]


def test_touching_segments_of_one_slot_are_joined() -> None:
    assert make_batch([Segment(0, 0, i, i + 1) for i in range(40)]).long == [Segment(0, 0, 0, 40)]


def test_an_adapter_without_a_module_adds_nothing_to_it() -> None:
    projection = Projection(16, 16, adapters=1)
    y, x = projection.random(2, 16), projection.random(2, 16)
    before = y.clone()
    projection.backend.write("linear", (0, 5), None, None)
    projection.backend.add(y, x, [Segment(0, 5, 0, 1), Segment(2, 0, 1, 2)])
    assert torch.equal(y, before)


def test_a_slot_can_be_written_again_and_cleared() -> None:
    backend = Linear(4, 4, 8)
    x = torch.ones(1, 4)
    for a, b in ((torch.ones(8, 4), torch.ones(4, 8)), (torch.ones(2, 4), torch.ones(4, 2)), (None, None)):
        if a is None:
            backend.write("linear", (0, 0), None, None)
        else:
            backend.load(0, 0, a, b, 0.5)
        y = torch.zeros(1, 4)
        backend.add(y, x, [Segment(0, 0, 0, 1)])
        assert torch.equal(y, torch.full((1, 4), 0.0 if a is None else 0.5 * 4 * a.shape[0]))


@pytest.mark.parametrize("rank", [1, 8, 9, 200, 256])
def test_a_rank_has_the_smallest_class_that_holds_it(rank: int) -> None:
    rank_class = rank_class_of(rank)
    assert RANKS[rank_class] >= rank
    assert rank_class == 0 or RANKS[rank_class - 1] < rank


def test_a_rank_beyond_the_largest_class_is_refused() -> None:
    with pytest.raises(ValueError, match="256"):
        rank_class_of(257)


def test_rows_reused_by_another_rank_class_keep_no_old_values() -> None:
    projection = Projection(16, 24, adapters=10)
    for slot in range(8):
        projection.backend.load(0, slot, torch.full((8, 16), float("nan")), torch.full((24, 8), float("nan")))
    a, b = projection.random(20, 16), projection.random(24, 20)
    projection.backend.load(2, 0, a, b)
    projection.backend.write("linear", (2, 1), None, None)
    x, y = projection.random(3, 16), projection.random(3, 24)
    segments = [Segment(2, 0, 0, 2), Segment(2, 1, 2, 3)]
    expected = reference.add_lora(y, x, segments[:1], {(2, 0): (a, b, 1.0)})
    projection.backend.add(y, x, segments)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_moved_adapter_gives_the_same_results() -> None:
    backend = Linear(16, 16, 64)
    random = torch.Generator().manual_seed(0)
    backend.load(0, 1, torch.randn(5, 16, generator=random), torch.randn(16, 5, generator=random), 0.5)
    x = torch.randn(1, 16, generator=random)
    before = torch.zeros(1, 16)
    backend.add(before, x, [Segment(0, 1, 0, 1)])
    backend.move((0, 1), (0, 6))
    backend.move((0, 2), (0, 1))
    for slot, expected in ((6, before), (1, torch.zeros(1, 16))):
        after = torch.zeros(1, 16)
        backend.add(after, x, [Segment(0, slot, 0, 1)])
        assert torch.equal(after, expected)


def test_copies_of_slots_that_do_not_lie_together_never_outgrow_the_rows() -> None:
    backend = Linear(8, 8, 64)
    weights = backend.weights["linear"]
    held = 64 * (8 + 8)
    a, b = torch.ones(8, 8), torch.ones(8, 8)
    x, y = torch.ones(3, 8), torch.zeros(3, 8)
    for rank_class in (0, 1, 0, 1):  # all rows go to one class, then to the other
        slots = 64 // RANKS[rank_class]
        for slot in range(slots):
            backend.load(rank_class, slot, a, b)
        for last in range(2, slots):
            segments = [Segment(rank_class, slot, row, row + 1) for row, slot in enumerate((0, last))]
            backend.add(y, x, segments)
            copies = [stack.selection for stack in weights.stacks if stack.selection is not None]
            assert sum(a.numel() + b.numel() for _, a, b in copies) <= held
        assert all(stack.a.untyped_storage().nbytes() == 64 * 8 * 4 for stack in weights.stacks)
