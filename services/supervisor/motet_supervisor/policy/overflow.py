"""What to do when a sequence reaches its promise (S3-10), as a table:

| free pages                                           | then                                                         |
|------------------------------------------------------|--------------------------------------------------------------|
| enough for twice its promise                         | extend to that, or to the most it can ever need (S3-13)      |
| some                                                 | extend by these                                              |
| any number, where the runner admits by forecast      | extend to twice its promise: the runner parks by itself if   |
|                                                      | pages are short                                              |
| none, but an ordered park will free some             | wait for it                                                  |
| none                                                 | park the newest of the lowest class, not parked twice before |
| none, and every request was parked twice             | park the one that overflows. It resumes with all pages it    |
|                                                      | can ever need, and is never parked again                     |
"""

from dataclasses import dataclass

from motet.domain import ParkMethod
from motet.runner_info import SequenceState
from motet_supervisor.policy.runners import TrackedRequest, WatchedRunner

MAX_PARKS_PER_REQUEST = 2
"""How often a request may be chosen as a victim."""


@dataclass(frozen=True, slots=True)
class ExtendTo:
    pages: int


@dataclass(frozen=True, slots=True)
class ParkVictim:
    victim: TrackedRequest
    doubled: int


@dataclass(frozen=True, slots=True)
class WaitForPages:
    """An ordered park will free pages."""


def decide(
    runner: WatchedRunner, overflowing: TrackedRequest, now: float, order_timeout: float
) -> ExtendTo | ParkVictim | WaitForPages:
    entry = overflowing.entry
    growth = runner.growth(entry)
    if growth > 0:
        return ExtendTo(entry.pages + growth)
    if runner.pages_being_freed > 0:
        return WaitForPages()
    candidates = [
        one
        for one in runner.sequences.values()
        if not one.parked
        and not one.order_pending(now, order_timeout)
        and one.entry.state is not SequenceState.LOADING
        and one.entry.parked_times < MAX_PARKS_PER_REQUEST
    ]
    victim = max(candidates, key=lambda one: (one.entry.request_class, one.arrival), default=None)
    if victim is None:
        return ParkVictim(overflowing, runner.max_pages(entry))
    return ParkVictim(victim, runner.doubled(victim.entry))


def cheapest(runner: WatchedRunner, victim: TrackedRequest, forced: ParkMethod | None) -> ParkMethod:
    """Swap costs a copy to the host and one back, and needs host memory; recompute costs a prefill of all tokens."""
    used = runner.pages_of_kv(victim.entry)
    # Forced or not: KV that does not fit in host memory can only be computed again.
    if forced is ParkMethod.RECOMPUTE or used * runner.capacity.page_bytes > runner.host_bytes_free:
        return ParkMethod.RECOMPUTE
    if forced is not None:
        return forced
    swap = 2 * used * runner.swap_seconds_per_page
    recompute = (victim.entry.prompt_tokens + victim.entry.output_tokens) * runner.prefill_seconds_per_token
    # Before any measurement both costs are zero; a copy is the safer choice.
    return ParkMethod.SWAP if swap <= recompute or not recompute else ParkMethod.RECOMPUTE
