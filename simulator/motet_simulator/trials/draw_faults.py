"""Which faults a seed draws: each where and when it can do something. A trial counts those that did."""

from random import Random
from typing import get_args

from motet_simulator.trials.plan import (
    BUSIEST,
    GATEWAYS,
    LEADER,
    RUNNERS,
    SCHEDULERS,
    SECONDS,
    AdapterChange,
    Fault,
    FaultKind,
    TrialSettings,
)

FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)

LINK_KINDS: tuple[FaultKind, ...] = "break", "partition", "slow"

FILE_KINDS: tuple[FaultKind, ...] = "source away", "source slow", "disk full"
"""They are met when files of adapters are fetched."""

MIN_SECONDS: dict[FaultKind, float] = {
    "partition": 1.0,
    "slow": 1.0,
    "drain": 1.0,
    "leases away": 1.0,
    "leases garbled": 1.0,
    "engine hangs": 1.0,
    "engine slows": 1.0,
    "source away": 2.0,
    "source slow": 2.0,
    "disk full": 2.0,
}
"""Shorter ones pass before anything meets them."""

MAX_OFF_SECONDS = 3.0
"""Of a machine that everything is on: while it is off, nothing else happens."""

MIN_START_SECONDS = 5.0
"""Until adapters that are there from the start have been fetched."""

_GATEWAYS, _RUNNERS = (
    tuple(f"{kind}-{number}" for number in range(count)) for kind, count in (("gateway", GATEWAYS), ("runner", RUNNERS))
)

_BUSY_LINKS = (
    *((gateway, other) for gateway in _GATEWAYS for other in (LEADER, BUSIEST)),
    *((runner, other) for runner in _RUNNERS for other in (LEADER, "supervisor")),
)
_QUIET_LINKS = (LEADER, "supervisor"), (LEADER, "operator")
"""Hosts that have streams between them all the time. Those of the second kind say little."""

MIN_QUIET_SECONDS = 8.0
"""A partition of these may do nothing before pings fail."""

CHANCES: dict[FaultKind, float] = {
    **dict.fromkeys(FILE_KINDS, 0.3),
    "kill in write": 0.5,
    "clock jumps": 0.5,
    "slow": 0.5,
    "engine hangs": 0.8,
    "engine slows": 0.8,
}
"""That a fault does something. Of the others it is nearly sure."""

NEAR_CHANGE_SHARE = 0.6
"""Of the faults of whole processes, in half of the plans: those that come around one change of an adapter. So a
scheduler takes over that was not told yet, or a runner is lost that holds what was replaced."""

PROCESS_KINDS: tuple[FaultKind, ...] = "kill", "power off", "pause"

MIN_EXPECTED = 9.5
"""How many faults of a plan are expected to do something. Then hardly any trial has fewer than eight."""


def draw_faults(random: Random, settings: TrialSettings, changes: list[AdapterChange]) -> list[Fault]:
    schedulers = [f"scheduler-{number}" for number in range(1 if settings.local else SCHEDULERS)]
    everywhere = [*schedulers, "supervisor", "predictor", "operator", *_GATEWAYS, *_RUNNERS]
    disks = [*_RUNNERS, "scheduler-0"] if settings.local else _RUNNERS
    fetched = [change for change in changes if not change.deleted]
    fast = [change for change in fetched if not change.slow]
    later = [change for change in changes if change.at > 0]
    near = random.choice(later) if later and random.random() < 0.5 else None
    possible = _possible(settings, fetched, fast)
    kinds = random.sample(possible, len(possible) // 2 + 1)
    faults: list[Fault] = []
    for _ in range(random.randint(11, 16)):
        kind = random.choice(kinds)
        at, host, other = random.random() * SECONDS, random.choice(everywhere), ""
        seconds = random.choice((0.2, 1.0, 3.0, 8.0)) * random.uniform(0.5, 1.5)
        seconds = max(seconds, MIN_SECONDS.get(kind, 0.0))
        if kind == "power off" and settings.local:
            seconds = min(seconds, MAX_OFF_SECONDS)
        drains = [fault.at for fault in faults if fault.kind == "drain"]
        if kind == "clock jumps" and not drains:
            kind = "drain"
        if kind == "clock jumps":  # by its wall clock the operator tells, a moment later, when a drain ends
            at, host = random.choice(drains) + 0.1 * random.random(), "operator"
        elif kind in LINK_KINDS:
            linked = random.choice(_BUSY_LINKS if kind == "slow" else _BUSY_LINKS + _QUIET_LINKS)
            host, other = random.sample(linked, 2)
            if kind == "partition" and linked in _QUIET_LINKS:
                seconds = max(seconds, MIN_QUIET_SECONDS)
        elif kind in ("engine hangs", "engine slows"):
            host = BUSIEST
        elif kind in ("engine dies", "drain"):
            host = random.choice(_RUNNERS)
        elif kind in FILE_KINDS and fetched:
            change = random.choice(fetched if kind == "disk full" else fast)
            seconds = max(seconds, MIN_START_SECONDS) if change.at < 1 else seconds
            at = max(0.0, change.at - random.random() * seconds / 2)
            host = random.choice(disks) if kind == "disk full" else change.name
        elif kind in ("disk full", "kill in write"):
            host = "scheduler-0"
        elif kind in PROCESS_KINDS and near and random.random() < NEAR_CHANGE_SHARE:
            at = max(0.0, near.at + random.uniform(-1.0, 3.0))
            host = random.choice((LEADER, BUSIEST, "operator"))
        faults.append(Fault(kind, at, host, other, seconds))
    return faults


def draw_lies(random: Random) -> list[Fault]:
    """Who lies, and when. Drawn apart: in the other plans nobody does."""
    hosts = random.sample((*_RUNNERS, *_RUNNERS, *_GATEWAYS), random.randint(1, 3))
    return [Fault("lies", random.random() * SECONDS, host, seconds=random.uniform(2.0, 12.0)) for host in hosts]


def with_enough(random: Random, faults: list[Fault]) -> list[Fault]:
    """And more, if too few of these are expected to do something."""
    faults = list(faults)
    while sum(CHANCES.get(fault.kind, 1.0) for fault in faults) < MIN_EXPECTED:
        host = random.choice((*_GATEWAYS, *_RUNNERS, "scheduler-0", "supervisor"))
        kind: FaultKind = random.choice(("kill", "pause"))
        faults.append(Fault(kind, random.random() * SECONDS, host, seconds=random.uniform(0.5, 4.0)))
    return sorted(faults, key=lambda fault: fault.at)


def _possible(settings: TrialSettings, fetched: list[AdapterChange], fast: list[AdapterChange]) -> list[FaultKind]:
    """A scheduler that is alone has files and no Lease; the others have a Lease and no files."""
    needed: dict[FaultKind, bool] = {
        "lies": False,
        "kill in write": settings.local,
        "leases away": not settings.local,
        "leases garbled": not settings.local,
        "lease deleted": not settings.local,
        "source away": bool(fast),
        "source slow": bool(fast),
        "disk full": settings.local or bool(fetched),
    }
    return [kind for kind in FAULT_KINDS if needed.get(kind, True)]
