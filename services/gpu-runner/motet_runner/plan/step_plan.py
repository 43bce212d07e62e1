"""What travels from the plan to a worker and back: numbers, no tensors, no objects of the plan (OR-13, OR-14).

A worker has a table of rows. A sequence gets a row when it first runs, and loses it when it ends or is parked. Every
step names rows, so that a step of many long sequences stays a short message.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from motet.domain import Digest, RequestId
from motet.errors import MotetError
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.interface import Logprobs, Sampling
from motet_runner.plan.page_copies import Effect
from motet_runner.plan.prompt_scores import PromptScores


@dataclass(frozen=True, slots=True, kw_only=True)
class RowJoin:
    """A sequence gets a row. From then on the worker appends the tokens that it samples by itself."""

    row: int
    request: RequestId
    tokens: tuple[int, ...]
    """Prompt and output so far."""
    prompt_tokens: int
    left_pages: int = 0
    """Its first pages, which the window of its attention has left: new pages come after them."""
    adapter: Digest
    sampling: Sampling
    seed: int
    choice: int
    to_score: int | None = None
    """The place in the prompt of the first token whose log probability is wanted; None: of no token."""


@dataclass(slots=True)
class RowStep:
    """One row computes its tokens [start, start + count), and then samples the next one if `samples`. It is not frozen
    only because there are many: a frozen one takes four times as long to make."""

    row: int
    start: int
    count: int
    samples: bool
    new_pages: tuple[int, ...] = ()
    """Pages that are appended to the row's page table first."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows that each compute their newest token, and then sample the next one. As columns: while the same sequences
    decode, `rows` and `first_starts` are the same objects in each plan, and no object is made for a row (OR-14)."""

    rows: tuple[int, ...] = ()
    first_starts: tuple[int, ...] = ()
    """The tokens before the newest of each, when they began to decode together"""
    new_pages: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Row → pages that are appended to its page table first; rows without new ones are not in it."""
    iterations: int = 0
    """How many iterations of them came before this one; each was one token of each row."""

    @classmethod
    def of(cls, steps: Sequence[RowStep]) -> "DecodeRows":
        return cls(
            tuple(step.row for step in steps),
            tuple(step.start for step in steps),
            {step.row: step.new_pages for step in steps if step.new_pages},
        )

    @property
    def starts(self) -> tuple[int, ...]:
        """The tokens before the newest of each now"""
        if not self.iterations:
            return self.first_starts
        return tuple(start + self.iterations for start in self.first_starts)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[RowStep]:
        for row, start in zip(self.rows, self.starts, strict=True):
            yield RowStep(row, start, 1, samples=True, new_pages=self.new_pages.get(row, ()))


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """A worker reads an adapter from where `layout` says, and copies it into its run, a part with each plan."""

    number: int
    """No two loads have the same one."""
    digest: Digest
    layout: AdapterLayout


@dataclass(frozen=True, slots=True)
class LoadArrived:
    number: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadFailed:
    number: int
    error: MotetError


_NONE = DecodeRows()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One iteration. A worker forgets the adapters that are gone, makes the copies in their order, then the moves and
    the other changes of its table, copies the next parts of adapters, then computes the rows.

    Workers carry out plans in the order in which they were launched. So a page that one plan frees may be written by
    the next one, whether the first has ended or not.
    """

    number: int
    copies: tuple[Effect, ...] = ()
    moves: tuple[Mapping[int, int], ...] = ()
    """Pages that were moved by these copies, old page → new page, each mapping after the one before it. The page tables
    of all rows follow."""
    leaves: tuple[int, ...] = ()
    """Rows that lose their sequences. They may join again in the same plan."""
    joins: tuple[RowJoin, ...] = ()
    decodes: DecodeRows = _NONE
    prefills: tuple[RowStep, ...] = ()
    adapters: dict[Digest, int] = field(default_factory=dict)
    """Where the runs of the adapters of these rows begin now: the first page of each."""
    gone: tuple[Digest, ...] = ()
    """Adapters that are no longer on the device. If one was still loading, its load is given up."""
    loads: tuple[AdapterLoad, ...] = ()
    """Loads that begin."""
    loading: dict[int, int] = field(default_factory=dict)
    """All loads under way, by their numbers: the first page of each adapter's run now."""
    hurry: bool = False
    """No sequence has to wait meanwhile: wait a moment for what is read, and copy all of it."""

    @property
    def rows(self) -> tuple[RowStep, ...]:
        """Decodes and prefills. It makes an object for each."""
        return (*self.decodes, *self.prefills)

    def with_rows(self, rows: Sequence[RowStep]) -> "StepPlan":
        """The same for these rows, which may be a part of its own."""
        return replace(self, decodes=_NONE, prefills=tuple(rows))

    @property
    def only_decodes(self) -> bool:
        """Whether nothing changes, so that its rows go on if they were those of the plan before."""
        changes = self.copies or self.moves or self.leaves or self.joins or self.gone or self.loads or self.loading
        return not changes and not self.prefills

    @property
    def count(self) -> int:
        """How many rows it computes."""
        return len(self.decodes) + len(self.prefills)

    @property
    def prefill_tokens(self) -> int:
        return sum(row.count for row in self.prefills)


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What a finished iteration has brought. It is not frozen for the same reason as a RowStep."""

    number: int
    sampled: Sequence[int | None] = ()
    """For each row that samples, in the order of the plan, its token; None where the model's numbers are not finite."""
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    """Of the tokens for which they were asked, by their places in `sampled`"""
    prompt_logprobs: Mapping[int, PromptScores] = field(default_factory=dict)
    """Of the rows whose prompts are scored, by their numbers"""
    out_of_memory: tuple[int, ...] = ()
    """Rows that could not be computed, not even alone and token by token."""
    model_calls: int = 0
    """More than one if the rows do not fit into memory together."""
    retries: int = 0
    """How often memory did not suffice for rows, which were then computed in parts or not at all."""
    seconds: float = 0.0
    """From the rows to the sampled tokens. Copies of pages are not in it."""
    arrived: tuple[LoadArrived, ...] = ()
    """Adapters that later plans may use."""
    failed: tuple[LoadFailed, ...] = ()
    swapped_pages: int = 0
    """Copied between device and host, and the copies have ended. They may be those of earlier plans."""
    swap_seconds: float = 0.0
    attention_calls: int = 0
    padding: int = 0
    """Rows that were computed for no token."""

    @property
    def only_tokens(self) -> bool:
        """Whether it has brought nothing but tokens."""
        more = self.logprobs or self.prompt_logprobs or self.out_of_memory or self.retries or self.arrived
        return not more and not self.failed
