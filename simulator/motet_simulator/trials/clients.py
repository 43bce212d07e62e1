"""Clients of the gateways. Each knows which tokens it must get."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from motet.api.v1 import runner_pb2
from motet.errors import DeadlineExceeded, InvalidRequest, MotetError, NoRunner, PoolSaturated, RequestKillsEngines
from motet_gateway.generation import EndReason
from motet_simulator.fake_engine import tokens_of
from motet_simulator.trials.plan import Ask


@dataclass(slots=True)
class Client:
    """The sink of one request. `problem` says what it must never see."""

    ask: Ask
    now: Callable[[], float]
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
    """When it asked, or got its last token."""
    _expected: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.asked_at = self.moved_at = self.now()
        self._expected = tokens_of(self.ask.prompt, self.ask.seed, self.ask.max_tokens)

    @property
    def over(self) -> bool:
        return self.left or self.how is not None

    @property
    def answered(self) -> bool:
        return self.how is EndReason.LENGTH

    def leave(self) -> None:
        """It cancels, or its gateway dies."""
        if not self.over:
            self.left, self.over_at = True, self.now()

    def placed(self) -> None:
        self.placed_times += 1

    def waiting(self, for_what: str) -> None: ...

    def score(self, logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None: ...

    def deliver(self, tokens: Sequence[int], logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None:
        if self.over:
            self._object("gets tokens after its end")
        self.moved_at = self.now()
        self.tokens.extend(tokens)
        if self.tokens != self._expected[: len(self.tokens)]:
            self._object(f"gets other tokens than an undisturbed run: {len(self.tokens)} so far")

    def end(self, how: EndReason | MotetError) -> None:
        if self.over:
            self._object(f"ends again, with {how!r}")
        self.how, self.over_at = how, self.now()
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
            case DeadlineExceeded() | NoRunner():
                silent = self.now() - self.moved_at
                if silent < 0.95 * self.ask.deadline:
                    self._object(
                        f"ends by its deadline of {self.ask.deadline:.1f} s, but was silent for {silent:.1f} s only"
                    )
            case InvalidRequest() if self.ask.unreadable:
                pass
            case RequestKillsEngines() if self.placed_times > 1:
                pass  # no request kills engines here, but faults that meet the same one again look like that
            case _:
                self._object(f"ends with {how!r}")

    def _object(self, what: str) -> None:
        self.problem = self.problem or f"{self.ask.name} {what}"
