"""What happens in a trial: all of it is known before anything runs.

`draw` makes a plan of a seed, `shrink` a smaller one of another.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from motet.runner_info import RequestClass

FaultKind = Literal[
    "kill",
    "kill in write",
    "power off",
    "pause",
    "break",
    "partition",
    "slow",
    "engine dies",
    "engine hangs",
    "engine slows",
    "drain",
    "clock jumps",
    "leases away",
    "leases garbled",
    "lease deleted",
    "source away",
    "source slow",
    "disk full",
    "new base",
    "lies",
]

SECONDS = 20.0
"""How long requests come and faults happen."""

SCHEDULERS, GATEWAYS, RUNNERS = 2, 2, 3

LEADER, BUSIEST = "leader", "busiest"
"""As a host of a fault: the scheduler that leads when it begins, and the runner with the most requests."""

PAGE_TOKENS = 16
CONTEXT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Ask:
    """A client asks one gateway."""

    name: str
    at: float
    gateway: int
    prompt: tuple[int, ...]
    max_tokens: int
    tenant: str
    request_class: RequestClass
    seed: int
    adapter: str = ""
    cancel_after: float | None = None
    """Seconds until the client leaves."""
    deadline: float = 300.0
    unreadable: bool = False
    """Its estimate has a number that no scheduler takes: it alone is refused."""
    too_large: bool = False
    """No runner can hold it: it alone is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChange:
    """Somebody applies an adapter's manifest, or deletes it."""

    BROKEN: ClassVar = 100

    at: float
    name: str
    number: int
    """The next change of this adapter has the next number."""
    deleted: bool = False
    content: int = 0
    """Which bytes. Two adapters of one content have the same digest. From BROKEN on they fit no base model."""
    in_place: bool = False
    """Its files are replaced where they are. Otherwise each change has another source."""
    min_replicas: int = 0
    max_replicas: int = RUNNERS
    slow: bool = False
    """Its files always come slowly."""

    @property
    def source(self) -> str:
        return f"file:///adapters/{self.name}" if self.in_place else f"hf://adapters/{self.name}-{self.number}"


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    at: float
    host: str
    """Of a source: the adapter's name. A new base model is everybody's."""
    other: str = ""
    """Of a break, a partition or a slow way: the host at its other end."""
    seconds: float = 0.0
    """How long it lasts; of a kill: until the process is started again."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a tenant may use at most. 0: as much as it wants."""

    tenant: str
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrency: int = 0

    @property
    def override(self) -> dict[str, object]:
        """In the pool's manifest."""
        limits = {
            "requestsPerMinute": self.requests_per_minute,
            "tokensPerMinute": self.tokens_per_minute,
            "concurrency": self.concurrency,
        }
        return {"namespace": self.tenant} | {name: limit for name, limit in limits.items() if limit}


NO_LIMITS = Grant("")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """Small limits, so that they are reached."""

    pages: int = 64
    max_sequences: int = 8
    queue_limit: int = 10_000
    max_passed_over: int = 64
    step_seconds: float = 0.03
    host_pages: int = 16
    plan_ahead: int = 0
    overcommit: float = 1.0
    force_promise_pages: int = 0
    adapter_pages: int = 1
    adapter_slots: int = 8
    cached_adapters: int = 8
    hang_seconds: float = 20.0
    preset: str = "paged-chunk"
    shrinks: bool = False
    """An autoscaler may remove runners, so that the scheduler moves requests together. None is removed."""
    local: bool = False
    """One scheduler with a lock file, as on one machine; otherwise two that elect a leader."""


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    """Also decides what the network does."""
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    settings: TrialSettings = field(default_factory=TrialSettings)
    changes: tuple[AdapterChange, ...] = ()
    grants: tuple[Grant, ...] = ()

    @property
    def drawn_events(self) -> int:
        return len(self.asks) + len(self.faults) + len(self.changes)

    def grant_of(self, tenant: str) -> Grant:
        return next((grant for grant in self.grants if grant.tenant == tenant), NO_LIMITS)

    def may_be_missing(self, adapter: str) -> bool:
        """Whether this adapter is not there all the time."""
        changes = [one for one in self.changes if one.name == adapter]
        return any(one.deleted for one in changes) or (bool(changes) and changes[0].at > 0)

    def may_fail(self, adapter: str) -> bool:
        """Whether something happens to this adapter by which its requests may fail. The base model has none."""
        changes = [one for one in self.changes if one.name == adapter]
        return adapter != "" and (
            any(one.deleted or one.content >= AdapterChange.BROKEN for one in changes)
            or (len(changes) > 1 and changes[0].in_place)
            or any(one.host == adapter for one in self.faults)
            or any(one.kind == "disk full" and one.host.startswith("runner") for one in self.faults)
        )

    def __str__(self) -> str:
        drawn: tuple[Ask | Fault | AdapterChange, ...] = (*self.asks, *self.faults, *self.changes)
        events = sorted((one.at, f"  {one.at:6.3f} {one}") for one in drawn)
        lines = [f"seed {self.seed}, {self.settings}", *map(str, self.grants), *(line for _, line in events)]
        return "\n".join(lines)
