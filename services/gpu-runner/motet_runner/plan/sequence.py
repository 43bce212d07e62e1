"""One sequence: its tokens, how far they are computed, its promise, and the arithmetic on them."""

from dataclasses import dataclass, field

from motet import promises
from motet.domain import Digest, ParkMethod, RequestId, pages_for
from motet_runner.interface import EngineSequenceReport, NewSequence, State
from motet_runner.plan.forecast import ANY_NUMBER, LengthLaw, Prospect
from motet_runner.plan.prefix_cache import PageChain
from motet_runner.plan.prompt_scores import first_to_score

_ENDLESS = LengthLaw.endless()

MAX_PARKED_AS_VICTIM = 2
"""A sequence that was parked this often is never chosen as a victim. Its last parking asks for the whole remaining
life, so it never stands at a promise again: there is no deadlock. By a forecast it resumes only where the whole lives
of all such sequences fit."""

PROVED_BY_TOKENS = 2
"""New tokens after which a sequence is no longer suspect: the first shows that its prompt and delivered tokens can be
computed and its row sampled, the second that it can be decoded."""


@dataclass(slots=True, eq=False)
class Sequence:
    new: NewSequence
    arrival: int
    """Its number in the order of arrival at this engine."""
    promise: int
    tokens: list[int]
    """Prompt and output. The last token's KV is computed by the iteration that samples the next one."""
    state: State
    page_tokens: int = field(kw_only=True)
    """How many tokens a page holds: of the engine, here because each iteration asks for it."""
    window: int | None = None
    """How many tokens a token attends to, itself included, if all layers have such a window."""
    scheduled: int = 0
    """How many tokens launched iterations have computed or will compute. Their KV is in `pages` when those iterations
    end; the KV of a sequence parked by swap is on the host."""
    computed: int = 0
    """How many of the scheduled tokens are of collected iterations."""
    pending: int = 0
    """How many output tokens launched iterations sample. Their values are not known yet."""
    charged_tokens: int = field(init=False)
    """Up to which token of its prompt its tenant was charged: here, or where its answer began."""
    restarts: int = 0
    """How often its KV was dropped. Iterations that were launched before do not count as computed."""
    restarts_after: int | None = None
    """The most tokens before all its keys are computed again (`plan.length_rope`)"""
    row: int | None = None
    """Its row of the worker's table, while it has one."""
    row_pages: int = 0
    """How many of its pages the worker knows, including those that the window has left."""
    pages: list[int] = field(default_factory=list)
    chain: PageChain | None = None
    """The digests of its pages. None: it shares no pages."""
    left_pages: int = 0
    """How many pages before `pages` its attention's window has left. They were given back."""
    promise_number: int = field(init=False)
    """Of its promise, or of the one that it asks for while it is parked: each change makes a new one."""
    announced: bool = False
    """Whether the end of the present promise has been announced (S3-10: once per promise)."""
    late: bool = False
    """True while it sits out iterations, because its mask is late."""
    waited: int = 0
    """For how many iterations it has stood at its promise without an answer."""
    started: bool = False
    cached_tokens: int | None = None
    """How many tokens of its prompt were in the prefix cache when it started; None: its output has said it."""
    passed_over: int = 0
    """In how many iterations later sequences started instead: it had no room, or its pages were not there."""
    paused: bool = False
    """Whether the latest iteration left it out for prompts."""
    paused_times: int = 0
    parked_times: int = 0
    parked_by: ParkMethod | None = None
    wanted: int = 0
    host_pages: list[int] = field(default_factory=list)
    """Where its KV lies in host memory while it is parked by swap."""
    # Constants that each iteration reads.
    request: RequestId = field(init=False)
    adapter: Digest = field(init=False)
    tenant: str = field(init=False)
    prompt_tokens: int = field(init=False)
    to_score: int = field(init=False)
    """The place in the prompt of the next token whose log probability is wanted; beyond the prompt if none is
    wanted."""
    most_pages: int = field(init=False)
    """The pages of its longest possible life."""
    law: LengthLaw | None = field(init=False)
    """How long its answer may become; None: nobody has estimated it."""

    def __post_init__(self) -> None:
        new = self.new
        self.request, self.adapter, self.tenant = new.request, new.adapter, new.tenant
        self.promise_number = new.promise_number
        self.prompt_tokens = len(new.prompt)
        self.charged_tokens = self.prompt_tokens if new.delivered else 0
        asked = new.sampling.prompt_logprobs
        self.to_score = first_to_score(asked, scored=new.scored, prompt_tokens=self.prompt_tokens)
        self.most_pages = promises.max_pages(self.prompt_tokens, new.sampling.max_tokens, page_tokens=self.page_tokens)
        self.law = LengthLaw.of(new.quantiles) if new.quantiles is not None else None

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def length(self) -> int:
        """How many tokens it has, with those that are sampled but not known yet."""
        return len(self.tokens) + self.pending

    @property
    def scored(self) -> bool:
        """True if no more log probabilities of its prompt are wanted."""
        return self.to_score >= self.prompt_tokens

    @property
    def to_schedule(self) -> int:
        return len(self.tokens) + self.pending - self.scheduled

    @property
    def pages_of_kv(self) -> int:
        """How many of its pages hold keys of scheduled tokens. A run has pages beyond these (S3-08)."""
        return pages_for(self.scheduled, self.page_tokens) - self.left_pages

    @property
    def decodes(self) -> bool:
        """True if all but the newest token are scheduled, so that one row gives the next token."""
        return self.scheduled > 0 and len(self.tokens) + self.pending - self.scheduled == 1

    @property
    def may_be_scheduled(self) -> bool:
        """False once its last token is being sampled. A worker that gets a new row for it, or computes its keys again,
        must know all of its tokens. So must one that holds them against a mask."""
        if self.pending == 0:
            return not self.late
        if self.new.mask is not None:
            return False
        if self.restarts_after is not None and self.length > self.restarts_after:
            return False
        return self.row is not None and self.output_tokens + self.pending < self.new.sampling.max_tokens

    def to_keep(self, window: int) -> int:
        """How many of its newest tokens must stay: with a mask its newest one may be computed again."""
        return window + (self.new.mask is not None)

    @property
    def held_at_most(self) -> int:
        """How many pages it has at the most from now on: those that its window reaches, and those of tokens that are
        not computed yet, because a window gives pages back after an iteration."""
        if self.window is None:
            return ANY_NUMBER
        size = self.page_tokens
        return pages_for(self.to_keep(self.window) - 1, size) + 1 + pages_for(max(0, self.to_schedule - 1), size)

    @property
    def resumes(self) -> bool:
        """True if another runner began its answer, and its reader waits for the first token from here."""
        return 0 < len(self.new.delivered) == self.output_tokens

    @property
    def suspect(self) -> bool:
        """True if an engine died while it had this sequence, and the sequence has not proved itself since."""
        return self.new.engines_lost > 0 and self.output_tokens - len(self.new.delivered) < PROVED_BY_TOKENS

    @property
    def room(self) -> int:
        """How many tokens may still be scheduled within its promise."""
        return self.promise * self.page_tokens - self.scheduled

    @property
    def at_promise(self) -> bool:
        return self.scheduled >= self.promise * self.page_tokens

    @property
    def stands_at_promise(self) -> bool:
        """True if it cannot go on without a larger promise."""
        return self.at_promise and self.may_be_scheduled

    @property
    def nears_promise(self) -> bool:
        """True if its next token is in the last promised page or beyond, and its life may be longer."""
        may_grow = self.promise < self.most_pages
        return may_grow and promises.is_near_promise(self.length, self.promise, page_tokens=self.page_tokens)

    @property
    def doubled(self) -> int:
        """The next promise (S3-13), capped by its longest life."""
        return promises.doubled_pages(self.promise, self.most_pages)

    @property
    def prospect(self) -> Prospect:
        """Without an estimate, its answer is expected to end with its promise."""
        tokens = len(self.tokens) + self.pending  # see `length`, which a forecast would ask for very often
        generated = tokens - self.prompt_tokens
        tokens -= self.left_pages * self.page_tokens
        law = self.law or _ENDLESS
        return Prospect(tokens, generated, self._most_expected(generated), law, self.held_at_most)

    @property
    def end_pages(self) -> int:
        """How many pages it needs at the end of its prospect. The sum of all is never less than any need of theirs, and
        it costs little."""
        tokens = len(self.tokens) + self.pending
        generated = tokens - self.prompt_tokens
        steps = self._most_expected(generated) - generated - 1
        pages = pages_for(tokens + steps if steps > 0 else tokens, self.page_tokens) - self.left_pages
        return pages if self.window is None else min(pages, self.held_at_most)

    def _most_expected(self, generated: int) -> int:
        most = self.new.sampling.max_tokens
        if self.law is not None:
            return most
        promised = max(self.new.promise, self.promise, self.wanted) * self.page_tokens - self.prompt_tokens
        return max(generated, min(most, promised))

    @property
    def longest_life(self) -> Prospect:
        """What it needs if its answer becomes as long as it can."""
        tokens = len(self.tokens) + self.pending
        generated = tokens - self.prompt_tokens
        tokens -= self.left_pages * self.page_tokens
        return Prospect(tokens, generated, self.new.sampling.max_tokens, _ENDLESS, self.held_at_most)

    @property
    def is_spared(self) -> bool:
        """True if it was parked so often that it is no victim any more."""
        return self.parked_times >= MAX_PARKED_AS_VICTIM

    def entry(self, charged_pages: int | None = None) -> EngineSequenceReport:
        return EngineSequenceReport(
            request=self.request,
            epoch=self.new.epoch,
            promise=self.wanted if self.state is State.PARKED else self.promise,
            pages_used=len(self.pages),
            state=self.state,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            adapter=self.adapter,
            tenant=self.tenant,
            priority=self.new.priority,
            parked_times=self.parked_times,
            charged_pages=charged_pages,
            promise_number=self.promise_number,
        )
