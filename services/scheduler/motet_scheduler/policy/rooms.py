"""How much room each runner has, and which have room for a request, found without a look at the others."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import count, islice
from typing import NamedTuple

from motet.domain import Digest
from motet_scheduler.policy.headroom import kept_of
from motet_scheduler.policy.requests import CapacityId, PageNeed, Request
from motet_scheduler.policy.runners import Runner


class Room(NamedTuple):
    """What a request may need there, in pages."""

    whole: int
    """At most, if it may have the last places."""
    small: int
    """At most, if it leaves them."""
    above: int
    """More than this, if it never leaves them: then it may have all. Not less than `whole`: none is so large."""
    leaving: Digest | None = None
    """Of those that need this adapter none may run there. None: all may."""

    def grew_from(self, before: "Room") -> bool:
        """Whether a request may fit that did not before."""
        return (
            self.whole > before.whole
            or self.small > before.small
            or (self.above < self.whole and self.above < min(before.above, before.whole))
        )


NO_ROOM = Room(0, 0, 0)

Places = tuple[int, int]
"""Those that are free on a runner, and those that it keeps. Each is for a request of the mean size of those there."""

NONE = (0, 0)

HELD = 3
"""While a runner lacks last places, the others make up for it as long as no more places than these are free in the
group: who needs one needs it on any runner."""

MAX_WOKEN = 16
"""Of the runners that have `grown`, on this number others are tried again at once, and `TryMore` goes on. All may have
when the group no longer lacks last places."""

MAX_ASKED = 16
"""Of the runners that have room for a request, this number are asked for a slot. Of more, one mostly has it."""

Line = list[tuple[int, int, Runner]]
"""Pages, a number that tells equal ones apart, and the runner. In order."""


class Rooms:
    """Of the runners of one group."""

    def __init__(self, one_in: int) -> None:
        self._one_in = one_in
        self._changed: dict[Runner, bool] = {}
        """At these nobody has looked since. Whether requests are tried there again in any case."""
        self._grown: dict[Runner, None] = {}
        """Those with more room than before, or where some need less. Requests would not be tried again there: mostly it
        was a placement, which also changes how much a runner keeps."""
        self._found: dict[Runner, tuple[int, Room]] = {}
        """Those that have room, each with the number by which it is in the lines."""
        self._numbers = count()
        self._by_whole: defaultdict[CapacityId, Line] = defaultdict(list)
        """By the most that a request may need."""
        self._by_beside: defaultdict[CapacityId, Line] = defaultdict(list)
        """The same of one that may not have the last places. A smaller one may not fit."""
        self._keeping = 0
        """How many keep last places from anybody."""
        self._places: dict[Runner, Places] = {}
        self._free = self._kept = self._lack = 0
        """The sums of these, and how many runners have fewer than they keep."""
        self.lacking = False
        """Whether the group lacked last places when it was last looked: then all room is kept for those for whom they
        are."""

    def __iter__(self) -> Iterator[Runner]:
        """Those that have room."""
        self._look()
        return iter(self._found)

    @property
    def any_keeps(self) -> bool:
        """Whether a runner with room keeps some of it."""
        if self._changed:
            self._look()
        return self._keeping > 0 or (self.lacking and bool(self._found))

    def lacks(self) -> bool:
        """`lacking`, and it is looked now."""
        if self._changed:
            self._look()
        return self.lacking

    def changed(self, runner: Runner) -> None:
        """It may have more room now, or keep less."""
        self._changed.setdefault(runner, False)

    def cheaper(self, runner: Runner) -> None:
        """The same, and some that wait need fewer pages there than before."""
        self.changed(runner)
        self._grown[runner] = None

    def freed(self, runner: Runner) -> None:
        """It may have more room now, and requests are tried there again."""
        self._changed[runner] = True

    @property
    def grown(self) -> dict[Runner, None]:
        """Runners where requests may fit now that were tried before."""
        if self._changed:
            self._look()
        return self._grown

    def take_grown(self) -> list[Runner]:
        """Some of those that have `grown`: on these they are tried again."""
        taken = list(islice(self.grown, MAX_WOKEN))
        for runner in taken:
            del self._grown[runner]
        return taken

    def forget_grown(self) -> None:
        """Nobody waits."""
        self._grown.clear()

    def of(self, runners: Collection[Runner]) -> dict[Runner, Room]:
        """Of these, those that have room."""
        if self._changed:
            self._look()
        found = self._found
        return {runner: found[runner][1] for runner in runners if runner in found}

    def may_hold(self, request: Request) -> bool:
        """Whether a runner has as much room as this request needs, and a slot for its adapter, or many have room."""
        for capacity, (pages, _) in request.page_needs.items():
            rooms = self._by_whole.get(capacity)
            if not rooms or rooms[-1][0] < pages:
                continue  # mostly
            begin = bisect_left(rooms, (pages,))
            if len(rooms) - begin > MAX_ASKED or any(one.slot_for(request.digest) for *_, one in rooms[begin:]):
                return True
        return False

    def that_fit(self, needs: Mapping[CapacityId, PageNeed], *, beside: bool) -> list[Runner]:
        """Those that may hold what needs this; `beside` their last places."""
        if self._changed:
            self._look()
        by_pages, found = self._by_beside if beside else self._by_whole, []
        for capacity, (pages, _) in needs.items():
            if (rooms := by_pages.get(capacity)) and rooms[-1][0] >= pages:
                found += [one for *_, one in rooms[bisect_left(rooms, (pages,)) :]]
        return found

    def _look(self) -> None:
        found, one_in = self._found, self._one_in
        for runner, tried_again in self._changed.items():
            room, places = _room(runner, one_in)
            if places != self._places.get(runner, NONE):
                self._note_places(runner, places)
            number, known = found.get(runner) or (next(self._numbers), NO_ROOM)
            if room == known:
                continue
            if room is NO_ROOM:
                del found[runner]
            else:
                found[runner] = number, room
                if not tried_again and room.grew_from(known):
                    self._grown[runner] = None
            whole, small, above, _ = room
            whole_known, small_known, above_known, _ = known
            self._keeping += (small < whole) - (small_known < whole_known)
            beside = whole if above < whole else small
            beside_known = whole_known if above_known < whole_known else small_known
            capacity = id(runner.capacity)
            if whole != whole_known:
                _refile(self._by_whole[capacity], whole_known, whole, number, runner)
            if beside != beside_known:
                _refile(self._by_beside[capacity], beside_known, beside, number, runner)
        self._changed.clear()
        lacked, self.lacking = self.lacking, self._lack > 0 and self._free <= self._kept and self._free <= HELD
        if lacked and not self.lacking:
            for line in self._by_beside.values():  # the roomiest first
                self._grown.update((runner, None) for pages, _, runner in reversed(line))

    def _note_places(self, runner: Runner, places: Places) -> None:
        before = self._places.pop(runner, NONE)
        if places != NONE:
            self._places[runner] = places
        self._free += places[0] - before[0]
        self._kept += places[1] - before[1]
        self._lack += (places[0] < places[1]) - (before[0] < before[1])

    def check(self, runners: Collection[Runner]) -> None:
        """Raises AssertionError if a runner has more room than was found, and nobody was told that it has changed."""
        for runner in runners:
            room, places = _room(runner, self._one_in)
            if runner in self._changed:
                continue
            assert places == self._places.get(runner, NONE), f"{runner.instance} has other places, and nobody was told"
            if room is NO_ROOM:
                continue
            assert runner in self._found, f"{runner.instance} has room, and nobody was told"
            _, found = self._found[runner]
            assert not room.grew_from(found), f"{runner.instance} has room for {room}, and {found} is known"


def _refile(line: Line, before: int, now: int, number: int, runner: Runner) -> None:
    """0: it is not there."""
    if before:
        del line[bisect_left(line, (before, number))]
    if now:
        insort(line, (now, number, runner))


def _room(runner: Runner, one_in: int) -> tuple[Room, Places]:
    if runner.parked or not runner.takes_work:
        return NO_ROOM, NONE
    limit, sequences = runner.ledger.limit, len(runner.entries)
    places, kept = kept_of(runner, one_in, limit)
    free, left = limit - runner.ledger.total, runner.max_sequences - sequences
    if free <= 0 or left <= 0:
        return NO_ROOM, (0, places)
    mean = kept // places if places else runner.ledger.total // (sequences or 1) or 1
    room = Room(free, max(0, free - kept), limit - kept) if left > places else Room(free, 0, free)
    if not sequences:  # it keeps nothing from anybody, also while the group lacks last places
        return room, (max(left, HELD + 1), 0)
    return room, (left if left * mean <= free else free // mean, places)
