"""What happens in a trial: a seed draws it once, before anything runs. A plan may also be a smaller one of another."""

from dataclasses import dataclass, field, replace
from random import Random
from typing import ClassVar, Literal, get_args

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
    "source away",
    "source slow",
    "disk full",
    "new base",
]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)

SECONDS = 20.0
"""How long requests come and faults happen."""

SCHEDULERS, GATEWAYS, RUNNERS = 2, 2, 3
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

    @property
    def drawn_events(self) -> int:
        return len(self.asks) + len(self.faults) + len(self.changes)

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
            or any(one.kind == "disk full" or one.host == adapter for one in self.faults)
        )

    def __str__(self) -> str:
        drawn: tuple[Ask | Fault | AdapterChange, ...] = (*self.asks, *self.faults, *self.changes)
        events = sorted((one.at, f"  {one.at:6.3f} {one}") for one in drawn)
        lines = [f"seed {self.seed}, {self.settings}", *(line for _, line in events)]
        return "\n".join(lines)


def draw_plan(seed: int) -> Plan:
    random = Random(seed)
    settings = TrialSettings(
        pages=random.choice((32, 64, 128)),
        max_sequences=random.choice((2, 4, 8, 20)),
        queue_limit=random.choice((2, 20, 10_000)),
        max_passed_over=random.choice((2, 8, 64)),
        step_seconds=random.choice((0.02, 0.03, 0.05)),
        host_pages=random.choice((0, 4, 64)),
        plan_ahead=random.choice((0, 1)),
        overcommit=random.choice((1.0, 1.0, 1.5)),
        force_promise_pages=random.choice((0, 0, 2)),
        adapter_pages=random.choice((1, 2, 8)),
        adapter_slots=random.choice((1, 2, 8)),
        cached_adapters=random.choice((1, 2, 8)),
        local=random.random() < 0.3,
    )
    changes = _draw_changes(random)
    adapters = tuple(dict.fromkeys(one.name for one in changes))
    asks = _draw_asks(random, settings, adapters)
    faults = _draw_faults(random, adapters)
    settings = replace(settings, hang_seconds=random.choice((6.0, 20.0)))
    if random.random() < 0.25:
        asks = _for_adapters_only(random, asks, settings, adapters)
        # Else one runner may get all that three can do.
        changes = [replace(change, max_replicas=RUNNERS) for change in changes]
    asks = _make_some_too_large(random, asks, settings)
    slow = {adapter for adapter in adapters if random.random() < 0.25}
    changes = [replace(change, slow=change.name in slow) for change in changes]
    return Plan(seed, tuple(asks), tuple(faults), settings, tuple(changes))


def _draw_changes(random: Random) -> list[AdapterChange]:
    """A life for each adapter: what is there from the start, later revisions, and sometimes a deletion between."""
    changes = []
    contents = random.choice((3, 12))
    for adapter in range(random.choice((0, 1, 2, 5))):
        at, in_place = 0.0, random.random() < 0.3
        for number in range(random.choice((1, 2, 4, 8))):
            at += random.expovariate(1 / 4) if number else random.choice((0.0, 0.0, 5 * random.random()))
            if at > SECONDS:
                break
            least = random.choice((0, 0, 1, RUNNERS))
            changes.append(
                AdapterChange(
                    at=at,
                    name=f"a{adapter}",
                    number=number,
                    deleted=number > 0 and random.random() < 0.2,
                    content=random.randrange(contents) + (AdapterChange.BROKEN if random.random() < 0.1 else 0),
                    in_place=in_place,
                    min_replicas=least,
                    max_replicas=max(least, random.choice((1, RUNNERS, RUNNERS))),
                )
            )
    return changes


def _draw_asks(random: Random, settings: TrialSettings, adapters: tuple[str, ...]) -> list[Ask]:
    count = random.randint(60, 110)
    at_once = min(settings.max_sequences, settings.pages * PAGE_TOKENS // 150)
    steps_per_second = RUNNERS * max(1, at_once) / settings.step_seconds
    load = random.choice((0.2, 0.5, 0.9, 1.5, 3.0))
    window = min(SECONDS, 1.2 * SECONDS / load)  # what is left at the end must have ended before the last check
    mean = max(4.0, min(120.0, load * window * steps_per_second / count))
    largest_of_all = min(settings.pages * PAGE_TOKENS, CONTEXT_TOKENS)
    asks = []
    unreadable = random.choice((0.0, 0.0, 0.03))
    for number in range(count):
        huge = random.random() < 0.02
        adapter = random.choice(adapters) if adapters and random.random() < 0.6 else ""
        beside = settings.adapter_pages if adapter else 0
        largest = min(largest_of_all, (settings.pages - beside) * PAGE_TOKENS)
        prompt = random.randint(largest // 2, largest - 2) if huge else min(int(random.expovariate(1 / 60)) + 1, 400)
        prompt = min(prompt, largest - 2)
        tokens = max(1, min(int(random.expovariate(1 / mean)) + 1, 300, largest - prompt))
        asks.append(
            Ask(
                name=f"r{number}",
                at=random.random() ** random.choice((0.5, 1.0, 2.0)) * window,
                gateway=random.randrange(GATEWAYS),
                prompt=(number, *(random.randrange(1000) for _ in range(prompt - 1))),
                max_tokens=tokens,
                tenant=random.choice(("acme", "acme", "umbrella", "initech")),
                request_class=random.choice(tuple(RequestClass)),
                seed=random.getrandbits(32),
                adapter=adapter,
                cancel_after=random.random() * 3 if random.random() < 0.1 else None,
                deadline=random.uniform(2, 10) if random.random() < 0.05 else 300.0,
                unreadable=random.random() < unreadable,
            )
        )
    return asks


def _for_adapters_only(
    random: Random, asks: list[Ask], settings: TrialSettings, adapters: tuple[str, ...]
) -> list[Ask]:
    """All that fit beside one. So an engine may have nothing to do until the files of an adapter have come."""
    largest = (settings.pages - settings.adapter_pages) * PAGE_TOKENS

    def fits(ask: Ask) -> bool:
        return ask.adapter != "" or len(ask.prompt) + ask.max_tokens <= largest

    return [replace(ask, adapter=random.choice(adapters)) if fits(ask) else ask for ask in asks] if adapters else asks


def _make_some_too_large(random: Random, asks: list[Ask], settings: TrialSettings) -> list[Ask]:
    share = random.choice((0.0, 0.0, 0.04))
    least = min(settings.pages * PAGE_TOKENS, CONTEXT_TOKENS)

    def made_larger(ask: Ask) -> Ask:
        more = least - len(ask.prompt) + random.randint(0, 50)
        return replace(ask, too_large=True, prompt=(*ask.prompt, *(random.randrange(1000) for _ in range(more))))

    return [made_larger(ask) if random.random() < share else ask for ask in asks]


def hosts() -> list[str]:
    """All hosts that faults may reach."""
    return [
        *(f"scheduler-{n}" for n in range(SCHEDULERS)),
        "supervisor",
        "predictor",
        "operator",
        *(f"gateway-{n}" for n in range(GATEWAYS)),
        *(f"runner-{n}" for n in range(RUNNERS)),
    ]


def _draw_faults(random: Random, adapters: tuple[str, ...]) -> list[Fault]:
    kinds = random.sample(FAULT_KINDS, len(FAULT_KINDS) // 2 + 1)
    everywhere = hosts()
    faults = []
    for _ in range(random.randint(8, 14)):
        kind = random.choice(kinds)
        at, host = random.random() * SECONDS, random.choice(everywhere)
        other = random.choice([one for one in everywhere if one != host])
        if kind.startswith("engine") or kind == "drain":
            host = f"runner-{random.randrange(RUNNERS)}"
        elif kind == "kill in write":
            host = f"scheduler-{random.randrange(SCHEDULERS)}"
        elif kind.startswith("source"):
            host = random.choice(adapters or ("",))
        faults.append(Fault(kind, at, host, other, random.choice((0.2, 1.0, 3.0, 8.0)) * random.uniform(0.5, 1.5)))
    return sorted(faults, key=lambda fault: fault.at)
