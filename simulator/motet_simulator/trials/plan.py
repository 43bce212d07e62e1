"""What happens in a trial: a seed draws it once, before anything runs. A plan may also be a smaller one of another."""

from dataclasses import dataclass, field
from random import Random
from typing import Literal, get_args

from motet.runner_info import RequestClass

FaultKind = Literal[
    "kill",
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
]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)

SECONDS = 20.0
"""How long requests come and faults happen."""

SCHEDULERS, GATEWAYS, RUNNERS = 2, 2, 3
PAGE_TOKENS = 16


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
    cancel_after: float | None = None
    """Seconds until the client leaves."""
    deadline: float = 300.0
    unreadable: bool = False
    """Its estimate has a number that no scheduler takes: it alone is refused."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    at: float
    host: str
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
    local: bool = False
    """One scheduler with a lock file, as on one machine; otherwise two that elect a leader."""


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    """Also decides what the network does."""
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    settings: TrialSettings = field(default_factory=TrialSettings)

    @property
    def drawn_events(self) -> int:
        return len(self.asks) + len(self.faults)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {self.settings}"]
        events = [(ask.at, f"  {ask.at:6.3f} {ask}") for ask in self.asks]
        events += [(fault.at, f"  {fault.at:6.3f} {fault}") for fault in self.faults]
        lines += [line for _, line in sorted(events)]
        return "\n".join(lines)


def draw_plan(seed: int) -> Plan:
    random = Random(seed)
    settings = TrialSettings(
        pages=random.choice((32, 64, 128)),
        max_sequences=random.choice((2, 4, 8, 20)),
        queue_limit=random.choice((5, 20, 10_000)),
        max_passed_over=random.choice((2, 8, 64)),
        step_seconds=random.choice((0.02, 0.03, 0.05)),
        host_pages=random.choice((0, 4, 64)),
        plan_ahead=random.choice((0, 1)),
        overcommit=random.choice((1.0, 1.0, 1.5)),
        force_promise_pages=random.choice((0, 0, 2)),
        local=random.random() < 0.3,
    )
    return Plan(seed, tuple(_draw_asks(random, settings)), tuple(_draw_faults(random)), settings)


def _draw_asks(random: Random, settings: TrialSettings) -> list[Ask]:
    count = random.randint(60, 110)
    at_once = min(settings.max_sequences, settings.pages * PAGE_TOKENS // 150)
    steps_per_second = RUNNERS * max(1, at_once) / settings.step_seconds
    load = random.choice((0.2, 0.5, 0.9, 1.5, 3.0))
    window = min(SECONDS, 1.2 * SECONDS / load)  # what is left at the end must have ended before the last check
    mean = max(4.0, min(120.0, load * window * steps_per_second / count))
    largest = min(settings.pages * PAGE_TOKENS, 1024)
    asks = []
    unreadable = random.choice((0.0, 0.0, 0.03))
    for number in range(count):
        huge = random.random() < 0.02
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
                cancel_after=random.random() * 3 if random.random() < 0.1 else None,
                deadline=random.uniform(2, 10) if random.random() < 0.05 else 300.0,
                unreadable=random.random() < unreadable,
            )
        )
    return asks


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


def _draw_faults(random: Random) -> list[Fault]:
    kinds = random.sample(FAULT_KINDS, len(FAULT_KINDS) // 2 + 1)
    everywhere = hosts()
    faults = []
    for _ in range(random.randint(8, 14)):
        kind = random.choice(kinds)
        at, host = random.random() * SECONDS, random.choice(everywhere)
        other = random.choice([one for one in everywhere if one != host])
        if kind.startswith("engine") or kind == "drain":
            host = f"runner-{random.randrange(RUNNERS)}"
        faults.append(Fault(kind, at, host, other, random.choice((0.2, 1.0, 3.0, 8.0)) * random.uniform(0.5, 1.5)))
    return sorted(faults, key=lambda fault: fault.at)
