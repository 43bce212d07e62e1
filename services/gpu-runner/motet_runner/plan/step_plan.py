"""The messages from the plan to a worker and back: numbers, no tensors, no objects of the plan (OR-13, OR-14).

A worker has a table of rows. A sequence gets a row when it first runs, and loses it when it ends or is parked. Every
step names rows, so that the message for a step of many long sequences is short.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from motet.domain import Digest, RequestId
from motet.errors import MotetError
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.interface import Logprobs, Sampling
from motet_runner.plan.page_copies import Copy
from motet_runner.plan.prompt_scores import PromptScores
from motet_runner.row_mask import RowMask


@dataclass(frozen=True, slots=True, kw_only=True)
class RowJoin:
    """A sequence gets a row. From then on the worker itself appends the tokens that it samples."""

    row: int
    request: RequestId
    tokens: tuple[int, ...]
    """Prompt and output so far."""
    prompt_tokens: int
    left_pages: int = 0
    """How many of its first pages its attention's window has left: new pages follow them."""
    adapter: Digest
    sampling: Sampling
    seed: int
    choice: int
    seed_is_drawn: bool = False
    """See `NewSequence.seed_is_drawn`."""
    to_score: int | None = None
    """The place in the prompt of the first token whose log probability is wanted; None: none is wanted."""
    mask: RowMask | None = None
    prefix_salt: bytes = b""
    """See `NewSequence.prefix_salt`. The plan finds shared pages itself; an engine that does not go by the plan's pages
    needs this."""


@dataclass(slots=True)
class RowStep:
    """One row computes its tokens [start, start + count), and then samples the next one if `samples`. It is not frozen,
    because making a frozen one takes four times as long, and there are many."""

    row: int
    start: int
    count: int
    samples: bool
    new_pages: tuple[int, ...] = ()
    """Pages that are appended to the row's page table first."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows that each compute their newest token, and then sample the next one. They are columns: while the same
    sequences decode, `rows` and `first_starts` are the same objects in each plan, and no object is made per row
    (OR-14)."""

    rows: tuple[int, ...] = ()
    first_starts: tuple[int, ...] = ()
    """How many tokens each had before its newest, when they began to decode together"""
    new_pages: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Row → pages that are appended to its page table first; only rows with new pages are in it."""
    iterations: int = 0
    """How many of their iterations came before this one, each with one token per row."""

    @classmethod
    def of(cls, steps: Sequence[RowStep]) -> "DecodeRows":
        return cls(
            tuple(step.row for step in steps),
            tuple(step.start for step in steps),
            {step.row: step.new_pages for step in steps if step.new_pages},
        )

    @property
    def starts(self) -> tuple[int, ...]:
        """How many tokens each has before its newest now"""
        if not self.iterations:
            return self.first_starts
        return tuple(start + self.iterations for start in self.first_starts)

    @property
    def context(self) -> int:
        """How many tokens they attend to, themselves included"""
        return sum(self.first_starts) + (self.iterations + 1) * len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[RowStep]:
        for row, start in zip(self.rows, self.starts, strict=True):
            yield RowStep(row, start, 1, samples=True, new_pages=self.new_pages.get(row, ()))


@dataclass(frozen=True, slots=True)
class LoadedContents:
    """What a loaded adapter's bytes are, beside the bytes"""

    linears: frozenset[str]
    """Those that it changes"""
    scales: bool
    """True if it scales the linears' own results."""
    from_slab: bool


@dataclass(frozen=True, slots=True)
class HostCopy:
    """An adapter's place in the memory that keeps adapters for their next load"""

    begin: int
    """In bytes"""
    contents: LoadedContents | None
    """None: the adapter is not there yet, and is read to this place."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An order to a worker: read an adapter from `layout`'s file, and copy it into its run, a part with each plan."""

    number: int
    """Unique per load."""
    digest: Digest
    layout: AdapterLayout
    host: HostCopy | None = None
    """None: the host's memory does not keep it."""


@dataclass(frozen=True, slots=True)
class LoadArrived:
    number: int
    seconds: float
    pause: float = 0.0
    """For how long iterations stood still for it, in all"""
    lacks_slab: bool = False
    """The adapter's slab is missing, or was damaged and is removed."""
    contents: LoadedContents | None = None
    """Of its place in the host's memory. None: it is not there."""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    number: int
    error: MotetError


@dataclass(frozen=True, slots=True)
class ProofStep:
    """An order to a worker: prove an adapter where it lies, a part with each plan. A plan that does not name this
    attempt gives it up."""

    number: int
    """Of the attempt: a later one has a larger number."""
    digest: Digest
    layout: AdapterLayout
    first_page: int
    """The present first page of the adapter's run"""
    order: ProofOrder
    """Which parts there are"""
    paused: bool = False
    """Do no part with this plan."""


@dataclass(frozen=True, slots=True)
class ProofResult:
    """An attempt has ended."""

    number: int
    found: Proof | MotetError
    """An AdapterUnproved if the adapter's results are wrong"""
    from_slab: bool = False
    """The bytes came from the adapter's slab: it may be damaged, and the adapter right."""


_NONE = DecodeRows()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One iteration. A worker forgets the adapters that are gone, makes the copies in order, then the moves and the
    other changes of its table, copies the next parts of adapters, then computes the rows.

    Workers carry out plans in the order of their launches. So a page that one plan frees may be written by the next
    plan, even before the first has ended.
    """

    number: int
    copies: tuple[Copy, ...] = ()
    moves: tuple[Mapping[int, int], ...] = ()
    """Pages that these copies moved, old page → new page; each mapping applies to the result of the previous one. The
    page tables of all rows follow."""
    leaves: tuple[int, ...] = ()
    """Rows that lose their sequences. They may join again in the same plan."""
    joins: tuple[RowJoin, ...] = ()
    decodes: DecodeRows = _NONE
    prefills: tuple[RowStep, ...] = ()
    adapters: dict[Digest, int] = field(default_factory=dict)
    """These rows' adapters → the present first page of each run."""
    gone: tuple[Digest, ...] = ()
    """Adapters that are no longer on the device. A load of such an adapter is given up."""
    loads: tuple[AdapterLoad, ...] = ()
    """Loads that begin."""
    loading: dict[int, int] = field(default_factory=dict)
    """All current loads, by number → the present first page of the adapter's run."""
    proof: ProofStep | None = None
    """The proof that goes on"""
    hurry: bool = False
    """No sequence would have to wait: wait a moment for more bytes of adapters, and copy all of them."""

    @property
    def rows(self) -> tuple[RowStep, ...]:
        """Decodes and prefills, as one new object per row."""
        return (*self.decodes, *self.prefills)

    def with_rows(self, rows: Sequence[RowStep]) -> "StepPlan":
        """The same plan for these rows, which may be a part of its rows."""
        return replace(self, decodes=_NONE, prefills=tuple(rows))

    @property
    def only_decodes(self) -> bool:
        """True if nothing else changes: if the previous plan had the same rows, they just continue."""
        changes = self.copies or self.moves or self.leaves or self.joins or self.gone or self.loads or self.loading
        return not changes and not self.prefills and self.proof is None

    @property
    def count(self) -> int:
        """How many rows the plan computes."""
        return len(self.decodes) + len(self.prefills)

    @property
    def prefill_tokens(self) -> int:
        return sum(row.count for row in self.prefills)


@dataclass(slots=True, kw_only=True)
class StepResult:
    """The result of a finished iteration. It is not frozen for the same reason as RowStep."""

    number: int
    sampled: Sequence[int | None] = ()
    """For each row that samples, in the order of the plan, its token; None where the model's numbers are not finite."""
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    """Place in `sampled` → the token's log probabilities, where they were asked for"""
    prompt_logprobs: Mapping[int, PromptScores] = field(default_factory=dict)
    """Row number → the scores of its prompt, if it is scored"""
    out_of_memory: tuple[int, ...] = ()
    """Rows that could not be computed, not even alone and token by token."""
    late: tuple[int, ...] = ()
    """Rows that get no token, because their masks are late."""
    model_calls: int = 0
    """More than one if the rows did not fit into memory together."""
    retries: int = 0
    """How often memory did not suffice for rows, which were then computed in parts or not at all."""
    seconds: float = 0.0
    """The time from the rows to the sampled tokens, without copies of pages."""
    arrived: tuple[LoadArrived, ...] = ()
    """Adapters that later plans may use."""
    failed: tuple[LoadFailed, ...] = ()
    silent: tuple[int, ...] = ()
    """Loads whose disks do not answer any more, each once"""
    left: tuple[int, ...] = ()
    """Loads that have failed or were given up, and write to the host's memory no more"""
    proved: ProofResult | None = None
    swapped_pages: int = 0
    """How many pages were copied between device and host, in copies that have ended, also of earlier plans."""
    swap_seconds: float = 0.0
    attention_calls: int = 0
    padding: int = 0
    """How many rows were computed without a token."""

    @property
    def only_tokens(self) -> bool:
        """True if tokens are its only results."""
        more = self.logprobs or self.prompt_logprobs or self.out_of_memory or self.late or self.retries
        return not more and not (self.arrived or self.failed or self.silent or self.left) and self.proved is None
