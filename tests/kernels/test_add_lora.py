"""add_lora against its fp64 oracle, on traffic with names."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_kernels import LinearGroup, LoraBatch, PlacedAdapter, Segment, TorchBackend, reference
from motet_kernels.cpp import CppBackend, Library
from motet_kernels.run_stacks import RunStack
from testbed.compiled_kernels import compiled_library
from tests.support.device import DEVICE

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
PAGE = 256
LINEAR = frozenset({"linear"})


class Projection:
    """Adapters of mixed ranks on one linear, in memory that holds no numbers elsewhere, and rows that go through them.

    `copies`: bytes for copies of runs, as a share of all runs. With a library, its back end; else the one in torch.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        ranks: Sequence[int],
        dtype=torch.float32,
        library: Library | None = None,
        *,
        copies: float = 1.0,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        device = DEVICE if library is None else torch.device("cpu")
        self.random = lambda *shape: torch.randn(*shape, generator=generator).to(device)
        groups = [LinearGroup(inputs, {"linear": outputs})]
        layout = TorchBackend(groups, torch.empty(0, dtype=torch.uint8), dtype, copy_bytes=0).layout
        sizes = [layout(rank).bytes for rank in ranks]
        self.memory = torch.full((2 * sum(sizes) + PAGE,), 255, dtype=torch.uint8, device=device)
        if library is None:
            self.backend = TorchBackend(groups, self.memory, dtype, copy_bytes=int(copies * sum(sizes)))
        else:
            self.backend = CppBackend(groups, self.memory, dtype, library=library)
        self.matrices: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
        self.placed: list[PlacedAdapter] = []
        end = PAGE
        for index, (rank, size) in enumerate(zip(ranks, sizes, strict=True)):
            self.load(str(index), end, rank, 0.5 + index % 3)
            self.placed.append(PlacedAdapter(str(index), end, layout(rank).rank, LINEAR))
            end += size + PAGE * (index % 3)

    def load(self, name: str, begin: int, rank: int, scale: float) -> None:
        """Write an adapter's run, as PEFT saves its matrices."""
        layout = self.backend.layout(rank)
        ((group),) = layout.groups
        a, b = self.random(rank, group.inputs) / group.inputs**0.5, self.random(group.outputs["linear"], rank)
        self.matrices[name] = a, b, scale
        run = self.memory[begin : begin + layout.bytes]
        run.zero_()
        layout.write(run, "linear", a, b, scale)

    def move(self, index: int, begin: int) -> None:
        """Carry a run to another place, and leave no numbers behind."""
        old = self.placed[index]
        size = self.backend.layout(old.rank).bytes
        run = self.memory[old.offset : old.offset + size].clone()
        self.memory[old.offset : old.offset + size] = 255
        self.memory[begin : begin + size] = run
        self.placed[index] = old._replace(offset=begin)

    def segments(self, owners: Sequence[int | None]) -> list[Segment]:
        return [Segment(row, row + 1, self.placed[owner]) for row, owner in enumerate(owners) if owner is not None]

    def add(self, y: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment]) -> LoraBatch:
        batch = self.backend.make_batch(segments)
        self.backend.add_lora(y, x, "linear", batch)
        return batch

    def check(self, owners: Sequence[int | None], tolerance: float = 1e-4) -> LoraBatch:
        """Compare with the reference."""
        ((group),) = self.backend.layout(8).groups
        segments = self.segments(owners)
        x, y = self.random(len(owners), group.inputs), self.random(len(owners), group.outputs["linear"])
        expected = reference.add_lora(y, x, segments, self.matrices)
        batch = self.add(y, x, segments)
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
        return batch


@pytest.fixture(scope="module", params=["torch", "cpp"])
def library(request: pytest.FixtureRequest) -> Library | None:
    """That of the back end in C++; None for the one in torch."""
    return compiled_library() if request.param == "cpp" else None


def mixed(adapters: int) -> list[int]:
    return [RANK_OF[index % len(RANK_OF)] for index in range(adapters)]


@pytest.mark.parametrize("rows", [1, 7, 64, 133])
@pytest.mark.parametrize("traffic", TRAFFIC)
@pytest.mark.parametrize("shape", [(48, 80), (64, 16)], ids=str)
def test_matches_the_reference(library: Library | None, traffic: str, rows: int, shape: tuple[int, int]) -> None:
    adapters = 140 if traffic == "every row its own" else 70
    Projection(*shape, mixed(adapters), library=library).check(TRAFFIC[traffic](rows))


OWNERS = st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=1, max_size=60)


@given(
    batches=st.lists(OWNERS, min_size=1, max_size=5), inputs=st.integers(1, 33), outputs=st.integers(1, 33),
    copies=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_matches_the_reference_whoever_comes_and_goes(
    library: Library | None, batches: list[list[int | None]], inputs: int, outputs: int, copies: float
) -> None:
    """In any order and size, and with any room for copies."""
    projection = Projection(inputs, outputs, mixed(10), library=library, copies=copies)
    for owners in batches:
        projection.check(owners)


def test_rows_without_an_adapter_are_not_touched_at_all(library: Library | None) -> None:
    projection = Projection(32, 32, mixed(4), library=library)
    owners = [None, 0, None, 1, 1, None]
    x, y = projection.random(6, 32), projection.random(6, 32)
    x[[0, 2, 5]] = float("nan")
    y[[0, 2, 5]] = float("nan")
    before = y.clone()
    projection.add(y, x, projection.segments(owners))
    assert y[[0, 2, 5]].isnan().all()
    assert not y[[1, 3, 4]].isnan().any()
    assert (y[[1, 3, 4]] != before[[1, 3, 4]]).any()


def test_a_row_that_is_not_finite_affects_no_other_row() -> None:
    """Blocks are padded; the padding of one adapter's block must not carry another's trouble."""
    projection = Projection(32, 32, [8, 8, 3])
    owners = [0, 0, 0, 1, 1, 2]  # three rows and two, in one product
    x, y = projection.random(6, 32), projection.random(6, 32)
    x[0] = float("inf")
    batch = projection.add(y, x, projection.segments(owners))
    assert y[1:].isfinite().all()
    assert [stacked.width for stacked in batch.stacked] == [3]


def test_many_rows_of_one_adapter_are_one_product_and_few_share_one() -> None:
    projection = Projection(8, 8, [8, 8, 8, 16])
    first, second, third, alone = projection.placed
    segments = [Segment(0, 512, first), Segment(512, 513, second), Segment(513, 514, third), Segment(514, 516, alone)]
    batch = projection.backend.make_batch(segments)
    assert [(rows.start, rows.stop, rows.adapter) for rows in batch.in_place] == [
        (0, 512, first),
        (514, 516, alone),  # of its rank
    ]
    assert [(stacked.rows, stacked.width) for stacked in batch.stacked] == [(slice(512, 514), 1)]


def test_touching_segments_of_one_adapter_are_joined() -> None:
    batch = Projection(8, 8, [8]).check([0] * 40)
    assert [(rows.start, rows.stop) for rows in batch.in_place] == [(0, 40)]


def test_an_adapter_keeps_its_copy_while_a_prompt_of_it_is_computed() -> None:
    projection = Projection(8, 8, [8, 8])
    first, second = projection.placed
    decodes = [Segment(0, 1, first), Segment(1, 2, second)]
    projection.backend.make_batch(decodes)
    copied = copies_of(projection)
    projection.backend.make_batch([*decodes[:1], Segment(1, 33, first), Segment(33, 34, second)])
    assert copies_of(projection) == copied == {"0": 0, "1": 1}


def copies_of(projection: Projection, rank: int = 8) -> dict[str, int]:
    stack = projection.backend._stacks.of(rank)  # noqa: SLF001
    return {} if stack is None else dict(stack.position)


def test_only_those_that_join_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of those that stay, at most one for each that leaves."""
    projection = Projection(16, 16, [8] * 12)
    copied: list[int] = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *how: (copied.append(self.numel()), copy(self, *how))[1])
    costs = []
    for owners in ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4], [2, 3, 4], [3, 2, 4]):
        copied.clear()
        projection.backend.make_batch(projection.segments(owners))
        costs.append(sum(copied) / projection.backend.layout(8).bytes)
    assert costs == [4, 0, 1, 1, 1, 1, 0]


def test_a_copy_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of an adapter that had left must not pass for that of the one that could not be copied there."""
    projection = Projection(32, 32, [8] * 4)
    projection.check([0, 1, 2])
    copy = RunStack._copy  # noqa: SLF001

    def ends(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(RunStack, "_copy", ends)
    with pytest.raises(torch.OutOfMemoryError):
        projection.check([1, 2, 3])
    monkeypatch.setattr(RunStack, "_copy", copy)
    projection.check([1, 2, 3])
    projection.check([0, 3, 2, 1])


GROUPS = [
    LinearGroup(24, {"q": 40, "k": 16, "v": 16}),
    LinearGroup(24, {"gate": 8, "up": 32}),
    LinearGroup(8, {"o": 24}),
]


@pytest.mark.parametrize("linears", [("q", "k", "v"), ("gate", "up"), ("o",), ("v", "k", "base"), ("up",)], ids=str)
@pytest.mark.parametrize("owners", [[0, 1, 2], [0, 0, 1, 1], [1, 0, 2, 1, 3], [0, 3], [0] * 20 + [1, None, 2]], ids=str)
@pytest.mark.parametrize("in_blocks", [True, False], ids=["in blocks", "one by one"])
def test_linears_side_by_side_get_what_each_would_get_alone(
    linears: tuple[str, ...], owners: list[int | None], *, in_blocks: bool
) -> None:
    """Also where some adapters change only some of them, and where they are no group."""
    generator = torch.Generator().manual_seed(0)
    layout = TorchBackend(GROUPS, torch.empty(0, dtype=torch.uint8), torch.float32, copy_bytes=0).layout(8)
    memory = torch.randn(4 * layout.bytes // 4, generator=generator).view(torch.uint8).to(DEVICE)
    backend = TorchBackend(GROUPS, memory, torch.float32, copy_bytes=3 * layout.bytes)
    changed = [frozenset(layout.offsets), frozenset({"q", "v", "up"}), frozenset({"k"}), frozenset({"o"})]
    for index, names in enumerate(changed):
        run = memory[index * layout.bytes :][: layout.bytes]
        for linear in layout.offsets.keys() - names:
            layout.matrices(run, linear)[1].zero_()
    placed = [PlacedAdapter(str(index), index * layout.bytes, 8, names) for index, names in enumerate(changed)]
    if in_blocks:  # nothing was copied yet, so the copies are laid out for linears that are added together
        for group in GROUPS:
            backend.together(tuple(group.outputs), [0, *accumulate(group.outputs.values())])
    segments = [Segment(n, n + 1, placed[one]) for n, one in enumerate(owners) if one is not None]
    batch = backend.make_batch(segments)
    alone = TorchBackend(GROUPS, memory, torch.float32, copy_bytes=0)
    in_place = alone.make_batch(segments)
    widths = {linear: outputs for group in GROUPS for linear, outputs in group.outputs.items()} | {"base": 8}
    columns = [0, *accumulate(widths[linear] for linear in linears)]
    inputs = next((group.inputs for group in GROUPS if linears[0] in group.outputs), 24)
    x = torch.randn(len(owners), inputs, generator=generator).to(DEVICE)
    y = torch.randn(len(owners), columns[-1], generator=generator).to(DEVICE)
    expected = y.clone()
    for linear, first, last in zip(linears, columns, columns[1:], strict=False):
        if linear != "base":
            alone.add_lora(expected[:, first:last], x, linear, in_place)
    stack = backend._stacks.of(8)  # noqa: SLF001
    assert stack is not None
    assert bool(stack.joined) is in_blocks
    backend.add_lora_together(y, x, backend.together(linears, columns), batch)
    torch.testing.assert_close(y, expected)
    for linear, first, last in zip(linears, columns, columns[1:], strict=False):
        if linear != "base":  # also of copies that are laid out for others
            backend.add_lora(y[:, first:last], x, linear, batch)
            alone.add_lora(expected[:, first:last], x, linear, in_place)
    torch.testing.assert_close(y, expected)


def test_matrices_that_are_multiplied_together_follow_each_other() -> None:
    """torch would copy them in each product otherwise."""
    layout = TorchBackend(GROUPS, torch.empty(0, dtype=torch.uint8), torch.bfloat16, copy_bytes=0).layout(8)
    memory = torch.zeros(5 * layout.bytes, dtype=torch.uint8, device=DEVICE)
    backend = TorchBackend(GROUPS, memory, torch.bfloat16, copy_bytes=len(memory))
    names = frozenset(layout.offsets)
    backend.make_batch([Segment(n, n + 1, PlacedAdapter(str(n), n * layout.bytes, 8, names)) for n in range(3)])
    stack = backend._stacks.of(8)  # noqa: SLF001
    assert stack is not None
    for group in GROUPS:
        assert stack.group_a(group).shape == (3, 8 * len(group.outputs), group.inputs)
        assert stack.group_a(group).is_contiguous()
        assert all(stack.b(linear).is_contiguous() for linear in group.outputs)


def test_rows_in_the_order_that_the_back_end_wants_need_not_be_brought_together() -> None:
    projection = Projection(16, 16, [8] * 6)
    projection.check([0, 1, 2, 3, 4])
    present = [projection.placed[index] for index in (1, 2, 4, 5)]
    for whole in (False, True):  # the first batch brings 5 into the place of another
        in_order = sorted(present, key=projection.backend.order)
        owners = [projection.placed.index(adapter) for adapter in in_order]
        (stacked,) = projection.check(owners).stacked
        assert (stacked.whole is not None) is whole


def test_what_the_copies_have_no_room_for_is_read_in_place() -> None:
    projection = Projection(16, 16, [8] * 6, copies=0.5)
    batch = projection.check([0, 1, 2, 3, 4, 5, 5, None, 5])
    assert len(copies_of(projection)) == 3
    assert len(batch.in_place) == 4, "one of them has rows at two places"
    before = copies_of(projection)
    projection.check([5, 4, 3, 2, 1, 0])
    assert copies_of(projection) == before, "those that are there stay"


def test_copies_never_take_more_than_they_were_given() -> None:
    ranks = [8] * 8 + [16] * 4 + [64]
    projection = Projection(8, 8, ranks, copies=0.5)
    copies = projection.backend._stacks._copies  # noqa: SLF001
    for first in range(len(ranks)):
        projection.check([owner % len(ranks) for owner in range(first, first + 7)])
        held = {rank: projection.backend._stacks.of(rank) for rank in (8, 16, 64)}  # noqa: SLF001
        used = sum(len(stack.position) * stack.layout.bytes for stack in held.values() if stack is not None)
        assert used <= len(copies)
    assert projection.backend._stacks._copies is copies  # noqa: SLF001


def test_an_adapter_adds_nothing_to_a_linear_that_it_does_not_change(library: Library | None) -> None:
    projection = Projection(16, 16, [8, 8, 8, 16], library=library)
    for index in (0, 3):
        other = projection.placed[index] = projection.placed[index]._replace(linears=frozenset({"other"}))
        projection.memory[other.offset : other.offset + projection.backend.layout(other.rank).bytes] = 0
    y, x = projection.random(4, 16), projection.random(4, 16)
    before = y.clone()
    projection.add(y, x, projection.segments([0, 1, 2, 3]))
    assert torch.equal(y[[0, 3]], before[[0, 3]])
    assert (y[[1, 2]] != before[[1, 2]]).any()


@pytest.mark.parametrize("owners", [[0, 0], [0, 1, 2]], ids=["in place", "as a copy"])
def test_a_moved_adapter_gives_the_same_results(library: Library | None, owners: list[int]) -> None:
    projection = Projection(16, 16, [5, 8, 8], library=library)
    projection.check(owners)
    end = len(projection.memory) - projection.backend.layout(8).bytes
    projection.move(0, end // PAGE * PAGE)
    projection.check(owners)


def test_another_adapter_may_take_the_place_of_one_that_has_left() -> None:
    projection = Projection(16, 16, [8, 8, 8])
    for number, owners in enumerate(([0, 1, 2], [0, 0], [0, 1, 2], [2, 0])):
        name, begin = f"new {number}", projection.placed[0].offset
        projection.load(name, begin, 6, 2.0)
        projection.placed[0] = PlacedAdapter(name, begin, 8, LINEAR)
        batch = projection.check(owners)
        assert len(projection.backend._views) == len(batch.in_place), "nothing is kept of those that have left"  # noqa: SLF001


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_as_it_can_be(library: Library | None, dtype: torch.dtype) -> None:
    projection = Projection(32, 32, mixed(6), dtype, library)
    owners = [0, 1, 1, 8 % 6, 3, 3, 3, *[4] * 20]
    segments = projection.segments(owners)
    x, y = projection.random(len(owners), 32).to(dtype), projection.random(len(owners), 32).to(dtype)
    expected = reference.add_lora(y, x, segments, projection.matrices)
    projection.add(y, x, segments)
    torch.testing.assert_close(y.double(), expected, rtol=0.05, atol=0.3)
