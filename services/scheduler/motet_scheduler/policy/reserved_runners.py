"""What a runner that is reserved for an overdue request still has for others.

Nothing, if that request lacks pages or a place. If it lacks an adapter slot alone, pages and places would stay unused
until one is free: what it needs of them is kept, and the rest is for those that need no other slot, for the base model
or an adapter that runs there. But those for one of these adapters wait, the one that the fewest use: its slot is the
next to come free. No other of its requests comes meanwhile, so fewer and fewer of the least used one are left, however
often another one becomes that.
"""

from typing import NamedTuple

from motet.domain import BASE, Digest
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.rooms import Room
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import SchedulerConfig


class Left(NamedTuple):
    """What an overdue request leaves to others."""

    pages: int
    leaving: Digest
    """The adapter whose requests wait, too. `BASE`: none runs there."""

    def allows(self, request: Request, runner: Runner, config: SchedulerConfig) -> bool:
        digest = request.digest
        if digest != BASE and (digest == self.leaving or digest not in runner.adapters_running):
            return False
        return request.requirement_on(runner.capacity, config, runner.adapter_pages(digest)).room <= self.pages

    def of(self, room: Room) -> Room:
        """The part of this room."""
        whole, leaving = min(room.whole, self.pages), self.leaving if self.leaving != BASE else None
        return Room(whole, min(room.small, whole), room.above, leaving)


def leaving_first(runner: Runner, overdue: Request) -> Digest | None:
    """The adapter whose requests wait, too. None: it lacks no slot, and leaves nothing to others."""
    return None if runner.slot_for(overdue.digest) else runner.least_used_adapter


def left_on(runner: Runner, overdue: Request, config: SchedulerConfig) -> Left | None:
    """None: nothing."""
    if runner.slot_for(overdue.digest) or runner.sequences + 1 >= runner.max_sequences:
        return None
    need = overdue.requirement_on(runner.capacity, config, runner.adapter_pages(overdue.digest))
    pages = runner.free_for(overdue.digest) - need.room
    return Left(pages, runner.least_used_adapter) if pages > 0 else None
