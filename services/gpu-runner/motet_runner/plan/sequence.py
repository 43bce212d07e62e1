"""One sequence: its tokens, how far they are computed, what it was promised. The arithmetic has its names here."""

from dataclasses import dataclass, field

from motet import promises
from motet.domain import PAGE_TOKENS, Digest, ParkMethod, RequestId
from motet_runner.interface import EngineSequenceReport, NewSequence, State
from motet_runner.plan.prefix_cache import PageChain
from motet_runner.plan.prompt_scores import first_to_score

PROVED_BY_TOKENS = 2
"""New tokens after which a suspect is one no longer: the first shows that its prompt and delivered tokens can be
computed and its row sampled, the second that it can be decoded."""


@dataclass(slots=True, eq=False)
class Sequence:
    new: NewSequence
    arrival: int
    """Order of arrival at this engine."""
    promise: int
    tokens: list[int]
    """Prompt and output. The last token's KV is computed by the iteration that asks for the next one."""
    state: State
    scheduled: int = 0
    """Tokens that launched iterations compute or have computed. Their KV lies in `pages` when those iterations end; of
    a sequence parked by swap, it lies on the host."""
    computed: int = 0
    """Of the scheduled tokens, those of collected iterations."""
    pending: int = 0
    """Output tokens that launched iterations sample. Their values are not known yet."""
    restarts: int = 0
    """How often its KV was dropped. An iteration that was launched before counts no more as computed."""
    restarts_after: int | None = None
    """How many tokens it has at most before all its keys are computed again (`plan.length_rope`)"""
    row: int | None = None
    """Its row of the worker's table, while it has one."""
    row_pages: int = 0
    """How many of its pages the worker knows, with those that the window has left."""
    pages: list[int] = field(default_factory=list)
    chain: PageChain | None = None
    """The digests of its pages. None: it shares no pages."""
    left_pages: int = 0
    """Pages before `pages` that its attention's window has left. They were given back."""
    announced: bool = False
    """Whether the end of the present promise has been announced (S3-10: once per promise)."""
    waited: int = 0
    """Iterations it has stood at its promise without an answer."""
    started: bool = False
    passed_over: int = 0
    """In how many iterations sequences that arrived later started instead."""
    paused: bool = False
    """Whether the latest iteration left it out for prompts."""
    paused_times: int = 0
    parked_times: int = 0
    parked_by: ParkMethod | None = None
    wanted: int = 0
    host_pages: list[int] = field(default_factory=list)
    """Where its KV lies in host memory while it is parked by swap."""
    # What never changes, and is asked for in each iteration.
    request: RequestId = field(init=False)
    adapter: Digest = field(init=False)
    prompt_tokens: int = field(init=False)
    to_score: int = field(init=False)
    """The place in the prompt of the next token whose log probability is wanted; beyond the prompt if none is."""
    most_pages: int = field(init=False)
    """Pages of its longest possible life."""

    def __post_init__(self) -> None:
        new = self.new
        self.request, self.adapter, self.prompt_tokens = new.request, new.adapter, len(new.prompt)
        asked = new.sampling.prompt_logprobs
        self.to_score = first_to_score(asked, scored=new.scored, prompt_tokens=self.prompt_tokens)
        self.most_pages = promises.max_pages(self.prompt_tokens, new.sampling.max_tokens)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def length(self) -> int:
        """Tokens, with those that are sampled but not known yet."""
        return len(self.tokens) + self.pending

    @property
    def scored(self) -> bool:
        """No log probabilities of its prompt are wanted any more."""
        return self.to_score >= self.prompt_tokens

    @property
    def to_schedule(self) -> int:
        return len(self.tokens) + self.pending - self.scheduled

    @property
    def decodes(self) -> bool:
        """All but the newest token are scheduled, so one row brings the next."""
        return self.scheduled > 0 and len(self.tokens) + self.pending - self.scheduled == 1

    @property
    def may_be_scheduled(self) -> bool:
        """Nothing is left once its last token is being sampled. A worker that gets a new row for it must know all of
        its tokens, and so must one that computes its keys again."""
        if self.pending == 0:
            return True
        if self.restarts_after is not None and self.length > self.restarts_after:
            return False
        return self.row is not None and self.output_tokens + self.pending < self.new.sampling.max_tokens

    @property
    def resumes(self) -> bool:
        """Another runner began its answer, and its reader waits for the first token from here."""
        return 0 < len(self.new.delivered) == self.output_tokens

    @property
    def suspect(self) -> bool:
        """An engine died while it had this sequence, and it has not shown yet that it can be computed."""
        return self.new.engines_lost > 0 and self.output_tokens - len(self.new.delivered) < PROVED_BY_TOKENS

    @property
    def room(self) -> int:
        """Tokens that may still be scheduled within its promise."""
        return self.promise * PAGE_TOKENS - self.scheduled

    @property
    def at_promise(self) -> bool:
        return self.scheduled >= self.promise * PAGE_TOKENS

    @property
    def stands_at_promise(self) -> bool:
        """It cannot go on without a larger promise."""
        return self.at_promise and self.may_be_scheduled

    @property
    def nears_promise(self) -> bool:
        """What is to be computed next lies in the last promised page or beyond, and life may go on further."""
        return self.promise < self.most_pages and promises.is_near_promise(self.length, self.promise, self.most_pages)

    @property
    def doubled(self) -> int:
        """The next promise (S3-13), capped by its longest life."""
        return promises.doubled_pages(self.promise, self.most_pages)

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
            tenant=self.new.tenant,
            priority=self.new.priority,
            parked_times=self.parked_times,
            charged_pages=charged_pages,
        )
