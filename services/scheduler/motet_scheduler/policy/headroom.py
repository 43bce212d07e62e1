"""The last places of each runner are for a tenant that was given less than the others, so that it need not wait for the
end of what they run.

One place in `one_in` of a runner, by its batch or by its pages, and the pages of as many requests of mean size. While
those for whom they are have some of them and few are left in the group (`rooms.HELD`), other runners keep what comes
free in their place: so the next one of such a tenant mostly finds room, whichever runner's requests end first.

They are for the tenants with the lowest counter of the most urgent class in which a request waits or runs, and for a
class that is late to get its floor (`class_turns.py`). With one tenant alone, and on an empty runner, nothing is kept.
"""

from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from motet.domain import Digest
from motet.runner_info import RequestClass
from motet_scheduler.policy.order import order_of
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.shares import Shares

Kept = tuple[int, int]
"""Places and pages that a runner keeps."""

NOTHING = (0, 0)


def kept_on(runner: Runner, one_in: int) -> Kept:
    """What a runner keeps, if it is one place in `one_in`. 0: nothing."""
    return kept_of(runner, one_in, runner.ledger.limit)


def kept_of(runner: Runner, one_in: int, limit: int) -> Kept:
    """The same, if the limit of its pages is known."""
    most = runner.max_sequences
    if not one_in or most < one_in or not (sequences := len(runner.entries)):
        return NOTHING
    pages = runner.ledger.total // sequences or 1
    places = (most if most * pages <= limit else limit // pages) // one_in  # `min`, but this is asked very often
    return places, places * pages


class KeptFrom(NamedTuple):
    """What runners keep from one request."""

    one_in: int
    """One place in this number. 0: none."""
    own: Runner | None = None
    """The one that is reserved for it, which keeps nothing."""
    lacking: bool = False
    """Whether the group lacks last places: then all room is kept, but for a request so large that it never leaves
    them."""

    def allows(self, runner: Runner, pages: int, digest: Digest) -> bool:
        """Whether a request of `pages` leaves what the runner keeps."""
        if runner is self.own or not self.one_in:
            return True
        limit = runner.ledger.limit
        places, kept = kept_of(runner, self.one_in, limit)
        if places and len(runner.entries) + places >= runner.max_sequences:
            return False
        if places and pages + kept > limit:
            return True
        return not self.lacking and pages + kept <= runner.free_for(digest)


NOTHING_KEPT = KeptFrom(0)


class Standing(NamedTuple):
    """For whom the last places are."""

    request_class: RequestClass | None
    """None: for everybody."""
    lowest: float = 0.0
    """The counter of those for whom they are."""
    late: tuple[RequestClass, ...] = ()
    """These classes may have them, too."""

    def highest(self, request_class: RequestClass) -> float | None:
        """The highest counter of those of this class who may have them. None: nobody of it may."""
        standing, lowest, late = self  # `is_open_to`, but this is asked very often
        if standing is None or request_class in late:
            return inf
        return lowest if request_class is standing else None

    def is_open_to(self, request_class: RequestClass) -> bool:
        """Whether all of this class may have them."""
        return self.request_class is None or request_class in self.late


EVERYBODY = Standing(None)


class Headroom:
    def __init__(
        self,
        one_in: int,
        shares: Mapping[RequestClass, Shares],
        late: Callable[[], tuple[RequestClass, ...]],
    ) -> None:
        self._one_in = one_in
        self._shares = shares
        self._late = late
        self.stood = EVERYBODY
        """For whom they were when it was last looked who may have them."""
        self._standing: Standing | None = None
        """Known until the shares change: it is asked many times for each placement."""

    def shares_changed(self) -> None:
        """A tenant has come or gone, or was charged: one of its requests was placed."""
        self._standing = None

    def standing(self) -> Standing:
        if (standing := self._standing) is None:
            standing = self._standing = self._find_standing()
        return standing

    def _find_standing(self) -> Standing:
        if not self._one_in:
            return EVERYBODY
        found, alone = EVERYBODY, ""
        for request_class, shares in self._shares.items():
            tenants = len(shares)
            if tenants and found is EVERYBODY:
                found = Standing(request_class, shares.lowest(), self._late())
                if tenants == 1:
                    alone = next(iter(shares)).tenant
            if tenants > 1 or (tenants and next(iter(shares)).tenant != alone):
                return found
        return EVERYBODY

    def check(self) -> None:
        assert self.standing() == self._find_standing(), "the shares have changed, and the headroom was not told"

    def kept_from(self, request: Request) -> int:
        """One place in how many a runner keeps from this request. 0: none."""
        standing, lowest, late = self.standing()  # `highest`, but this is asked for each request that is tried
        if standing is None or request.request_class in late:
            return 0
        return 0 if request.request_class is standing and order_of(request)[0] <= lowest else self._one_in

    def is_for_lowest(self, request: Request) -> bool:
        """Whether it may have the last places as its tenant was given least."""
        standing = self.standing()
        if standing.is_open_to(request.request_class):
            return False
        return request.request_class is standing.request_class and order_of(request)[0] <= standing.lowest

    @property
    def moved(self) -> bool:
        """Whether the last places are for others than when it was last looked."""
        return self._standing is not self.stood and self.standing() != self.stood

    def opened_since(self, stood: Standing) -> list[RequestClass]:
        """The classes of which all may have the last places now, and might not then."""
        standing = self.standing()
        if stood.request_class is None or (standing.late == stood.late and standing.request_class is not None):
            return []  # mostly
        return [one for one in self._shares if standing.is_open_to(one) and not stood.is_open_to(one)]

    def look(self) -> bool:
        """Whether they `moved`, and it is looked now."""
        if self._standing is self.stood:  # mostly
            return False
        standing = self.standing()
        moved, self.stood = standing != self.stood, standing
        return moved
