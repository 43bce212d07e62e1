"""One request from its arrival to its end, and the arithmetic of what it is promised."""

from dataclasses import dataclass, field

from motet.fleet import Capacity, RequestClass
from motet.model import Digest, RequestId, Tenant
from motet_scheduler.policy.values import Estimate, GroupName, Instance, Policy, Promise

QueueKey = tuple[float, int]
"""When the client asked, then the order in which we heard of it: unique, and smaller is older."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request runs, under which epoch. The incarnation tells a restarted runner from the one that died."""

    instance: Instance
    incarnation: str
    epoch: int
    at: float


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
    patience: float = 0.0
    """Seconds it may wait for a place, each time it waits; 0: for ever."""
    deadline_at: float | None = None
    epoch: int = 0
    placement: Placement | None = None
    moved_because: str = ""
    avoid: dict[str, float] = field(default_factory=dict)
    """Instances not to be asked before a time."""
    declines: int = 0
    fatal: object | None = None
    """The failure with which a runner said that no runner will take it."""
    why: str = ""
    told: tuple[int, str] = (0, "")

    @property
    def key(self) -> QueueKey:
        return (self.asked_at, self.sequence)

    @property
    def waiting(self) -> bool:
        return self.placement is None

    def life_tokens(self, capacity: Capacity) -> int:
        """Tokens at its very end: what the client allows, within what the model can address."""
        return min(self.prompt_tokens + self.max_tokens, capacity.max_model_length)

    def promise_on(self, capacity: Capacity, policy: Policy) -> Promise:
        """Prompt, what is delivered, and what is still expected (q80), in pages; never more than its whole life.

        A request that has outlived its estimate is expected to go on for another page, and the supervisor doubles
        from there. `force_promise_pages` (tests) replaces the expectation: so many pages, or what the prompt needs.
        """
        life = self.life_tokens(capacity)
        known = self.prompt_tokens + self.delivered
        if policy.force_promise_pages:
            pages = max(policy.force_promise_pages, capacity.pages_for(known + 1))
        else:
            expected = self.estimate.q80 or self.max_tokens
            remaining = max(expected - self.delivered, capacity.page_tokens)
            pages = capacity.pages_for(min(known + remaining, life))
        pages = max(1, min(pages, capacity.pages_for(life)))
        return Promise(pages, min(pages * capacity.page_tokens, life))

    def avoids(self, instance: str, now: float) -> bool:
        return self.avoid.get(instance, 0.0) > now
