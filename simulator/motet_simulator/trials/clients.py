"""Clients of the gateways. Each knows which tokens it must get."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from motet.api.v1 import runner_pb2
from motet.errors import (
    AdapterError,
    BaseModelReplaced,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    MotetError,
    NoRunner,
    PoolSaturated,
    RateLimited,
    RequestKillsEngines,
)
from motet.runner_info import RequestClass
from motet.time_split import TimeSplit
from motet_gateway.catalog import Catalog, Target
from motet_gateway.generation import EndReason
from motet_simulator.fake_engine import tokens_of
from motet_simulator.trials.plan import NO_LIMITS, Ask, Grant

REPLACED = ModelNotFound, BaseModelReplaced
MAX_ATTEMPTS = 3
"""After a model was replaced: as in `motet_gateway.answers`."""
MAX_SPLIT_ERROR = 0.01
"""Of the time that a request took."""
MAX_GOING_ON_SECONDS = 2.0
"""How long a request may get tokens while it waits for another runner: until the drain of its own ends."""


@dataclass(slots=True)
class Client:
    """The sink of one request. `problem` says what it must never see.

    As the gateway's answers do, it asks again if its model was replaced before its first token.
    """

    ask: Ask
    now: Callable[[], float]
    arrival: Callable[[], float]
    """When a message that its gateway handles now came there, at the earliest."""
    catalog: Callable[[], Catalog]
    """Of its gateway."""
    start_again: "Callable[[Client], None]"
    grant: Grant = NO_LIMITS
    """Of its tenant."""
    adapter_may_fail: bool = False
    adapter_may_be_missing: bool = False
    base_may_change: bool = False
    may_drain: bool = False
    """Whether its runner may."""
    revision_is_gone: Callable[[Target], bool] = lambda _: False
    """Whether what it was asked for was replaced, and no runner holds it."""
    target: Target | None = None
    """What its model's name meant when it was asked last."""
    refused: tuple[Target, Catalog | None] | None = None
    """Which target was refused last, and the catalog of then if the base model was replaced: it waits for another."""
    attempts: int = 0
    tokens: list[int] = field(default_factory=list)
    how: EndReason | MotetError | None = None
    left: bool = False
    """It has cancelled, or its gateway has died."""
    placed_times: int = 0
    problem: str = ""
    ended: Callable[[], None] = lambda: None
    queue_limit: int = 0
    may_wait: Callable[["Client"], int] = lambda _: 0
    """How many other requests may have waited at the scheduler at one time since this one asked."""
    asked_at: float = 0.0
    over_at: float = math.inf
    moved_at: float = 0.0
    """When it asked, or when its last token came to its gateway."""
    started_at: float = 0.0
    """When its latest attempt began."""
    split: TimeSplit | None = None
    """Of its latest attempt, by its gateway. None: that has not been sent to a scheduler."""
    _expected: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.asked_at = self.moved_at = self.now()

    @property
    def request(self) -> str:
        """Another one for each attempt: late messages about earlier ones may still arrive."""
        return f"{self.ask.name}-{self.attempts}" if self.attempts else self.ask.name

    def starts(self, target: Target) -> None:
        self.target, self.moved_at, self.started_at = target, self.now(), self.now()
        weights = "".join(target.weights)
        self._expected = tokens_of(self.ask.prompt, self.ask.seed, self.ask.max_tokens, weights)

    def waits_for_another(self, target: Target, catalog: Catalog) -> bool:
        """Whether this target was refused a moment ago."""
        if self.refused is None:
            return False
        refused, under = self.refused
        return refused.weights == target.weights and (under is None or under is catalog)

    @property
    def over(self) -> bool:
        return self.left or self.how is not None

    @property
    def answered(self) -> bool:
        return self.how is EndReason.LENGTH

    @property
    def refused_for_room(self) -> bool:
        """It never came into a queue."""
        return isinstance(self.how, PoolSaturated)

    @property
    def _may_be_over_a_rate(self) -> bool:
        """And is refused for that. Class Batch waits instead."""
        rates = self.grant.requests_per_minute or self.grant.tokens_per_minute
        return bool(rates) and self.ask.request_class is not RequestClass.BATCH

    def leave(self) -> None:
        """It cancels, or its gateway dies."""
        if not self.over:
            self.left, self.over_at = True, self.now()

    def check_split(self) -> None:
        """Whether the parts of its time add up to it (S3-20)."""
        if self.split is None:
            return
        whole, parts = self.over_at - self.started_at, self.split.until(self.over_at)
        if min(parts) < 0 or abs(sum(parts) - whole) > MAX_SPLIT_ERROR * whole + 1e-9:
            self._object(f"took {whole:.4f} s, but its gateway says {parts}")

    def placed(self) -> None:
        self.placed_times += 1

    def waiting(self, for_what: str) -> None: ...

    def score(self, logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None: ...

    def deliver(self, tokens: Sequence[int], logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None:
        if self.over:
            self._object("gets tokens after its end")
        self.moved_at = self.arrival()
        self.tokens.extend(tokens)
        if self.tokens != self._expected[: len(self.tokens)]:
            self._object(f"gets other tokens than an undisturbed run: {len(self.tokens)} so far")

    def end(self, how: EndReason | MotetError) -> None:
        if self.over:
            self._object(f"ends again, with {how!r}")
        if isinstance(how, REPLACED) and self.target is not None and not self.tokens and self.attempts < MAX_ATTEMPTS:
            self.refused = self.target, self.catalog() if isinstance(how, BaseModelReplaced) else None
            self.attempts, self.split = self.attempts + 1, None
            self.start_again(self)
            return
        self.how, self.over_at = how, self.now()
        self.check_split()
        self.ended()
        match how:
            case EndReason():
                if how is not EndReason.LENGTH or len(self.tokens) != self.ask.max_tokens:
                    self._object(f"ends by {how} after {len(self.tokens)} of {self.ask.max_tokens} tokens")
            case PoolSaturated():
                if self.tokens:
                    self._object(f"is refused for room after {len(self.tokens)} tokens")
                elif (others := self.may_wait(self)) < self.queue_limit:
                    self._object(f"is refused for room, but at most {others} others waited")
            case RateLimited() if self._may_be_over_a_rate:
                if self.tokens:
                    self._object(f"is refused for its quota after {len(self.tokens)} tokens")
            case DeadlineExceeded() | NoRunner():
                silent = self.now() - self.moved_at
                waited = silent + (MAX_GOING_ON_SECONDS if self.tokens and self.may_drain else 0.0)
                if waited < 0.95 * self.ask.deadline:
                    self._object(
                        f"ends by its deadline of {self.ask.deadline:.1f} s, but was silent for {silent:.1f} s only"
                    )
            case ContextLengthExceeded() if self.ask.too_large:
                pass
            case InvalidRequest() if self.ask.unreadable:
                pass
            case AdapterError() if self.adapter_may_fail:
                pass
            case ModelNotFound() if self.adapter_may_be_missing:
                pass
            case ModelNotFound() if self.target is not None and self.revision_is_gone(self.target):
                pass
            case BaseModelReplaced() if self.base_may_change:
                pass
            case RequestKillsEngines() if self.placed_times > 1:
                pass  # no request kills engines here, but faults that meet the same one again look like that
            case _:
                self._object(f"ends with {how!r}")

    def _object(self, what: str) -> None:
        self.problem = self.problem or f"{self.ask.name} {what}"
