"""One request from its arrival to its end, and the arithmetic of what it is promised."""

from dataclasses import dataclass, field

from motet import promises
from motet.domain import Digest, InstanceName, RequestId, Tenant
from motet.runner_info import Capacity, RequestClass
from motet_scheduler.policy.values import Estimate, GroupName, Promise, SchedulerConfig

QueueKey = tuple[float, int]
"""When the client asked, then the order in which we heard of it: unique, and smaller is older."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request runs, under which epoch. The incarnation tells a restarted runner from the one that died."""

    instance: InstanceName
    incarnation: str
    epoch: int
    at: float


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a request would take on a runner of this capacity, once so many tokens have been delivered."""

    capacity: Capacity
    delivered: int
    never: str
    """Why no such runner could hold it even when empty (OR-09); empty when it could."""
    promise: Promise


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    id: RequestId
    gateway: str
    tenant: Tenant
    group: GroupName
    digest: Digest
    request_class: RequestClass
    prompt_tokens: int
    max_tokens: int
    """Of output, delivered ones included; 0 when only a runner's book told of it."""
    delivered: int = 0
    estimate: Estimate = field(default_factory=Estimate)
    asked_at: float
    sequence: int
    queue_timeout: float = 0.0
    """Seconds it may wait for a place, each time it waits; 0: for ever."""
    deadline_at: float | None = None
    tried_in_scan: int = -1
    """In which look at its queue it was found to fit nowhere; -1: not yet."""
    epoch: int = 0
    placement: Placement | None = None
    moved_because: str = ""
    engine_hung: bool = False
    """Of the runner that it moves away from."""
    avoid: dict[str, float] = field(default_factory=dict)
    """Instances not to be asked before a time."""
    declines: int = 0
    final_failure: object | None = None
    """The failure with which a runner said that no runner will take it."""
    waiting_reason: str = ""
    reported_position: tuple[int, str] = (0, "")
    need: Requirement | None = None
    """As computed last: a request is tried many times before it goes."""

    @property
    def key(self) -> QueueKey:
        return (self.asked_at, self.sequence)

    @property
    def waits_since(self) -> float:
        """When it last joined the queue, of one that has a deadline; else when it was asked for."""
        return self.deadline_at - self.queue_timeout if self.deadline_at is not None else self.asked_at

    @property
    def waiting(self) -> bool:
        return self.placement is None

    def requirement_on(self, capacity: Capacity, policy: SchedulerConfig) -> Requirement:
        need = self.need
        if need is None or need.capacity is not capacity or need.delivered != self.delivered:
            promise = self.promise_on(capacity, policy)
            need = self.need = Requirement(capacity, self.delivered, self._never_fits(capacity), promise)
        return need

    def _never_fits(self, capacity: Capacity) -> str:
        if self.prompt_tokens + max(self.delivered, 1) > capacity.max_model_length:
            return (
                f"the prompt has {self.prompt_tokens} tokens and the model's context is "
                f"{capacity.max_model_length}; shorten the prompt"
            )
        most = self._most_pages(capacity)
        if most > capacity.pages:
            return (
                f"prompt and max_tokens may need {most} pages of {capacity.page_tokens} tokens and a runner holds "
                f"{capacity.pages}; lower max_tokens or raise the pool's kvCacheMiB"
            )
        return ""

    def promise_on(self, capacity: Capacity, policy: SchedulerConfig) -> Promise:
        """By the common rule, with q80 as what is expected. `force_promise_pages` (tests) replaces the expectation: so
        many pages, or what the prompt needs."""
        most = self._most_pages(capacity)
        if policy.force_promise_pages:
            known = capacity.pages_for(self.prompt_tokens + self.delivered + 1)
            pages = min(max(policy.force_promise_pages, known), most)
        else:
            pages = promises.initial_pages(
                self.prompt_tokens,
                self.max_tokens,
                delivered=self.delivered,
                expected=self.estimate.q80,
                context_tokens=capacity.max_model_length,
                page_tokens=capacity.page_tokens,
            )
        return Promise(pages, min(pages * capacity.page_tokens, self._longest_life(capacity)))

    def _longest_life(self, capacity: Capacity) -> int:
        context = capacity.max_model_length
        return promises.max_kv_tokens(self.prompt_tokens, self.max_tokens, context_tokens=context)

    def _most_pages(self, capacity: Capacity) -> int:
        return promises.max_pages(
            self.prompt_tokens,
            self.max_tokens,
            context_tokens=capacity.max_model_length,
            page_tokens=capacity.page_tokens,
        )

    def avoids(self, instance: str, now: float) -> bool:
        return self.avoid.get(instance, 0.0) > now
