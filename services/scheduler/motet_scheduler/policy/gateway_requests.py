"""The requests of each gateway.

When a gateway goes, a hundred thousand of its requests may wait. Even to look at all of them would delay everything
else. So they are over together, at once, and each event ends some.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from motet.domain import RequestId

if TYPE_CHECKING:
    from motet_scheduler.policy.requests import Request


class Asked:
    """Requests that may be over together."""

    __slots__ = ("over", "requests")

    def __init__(self, *, over: bool = False) -> None:
        self.over = over
        """Whether their gateway has gone, or no longer knows them."""
        self.requests: dict[RequestId, Request] = {}


NOT_OVER = Asked()
"""Of a request that has not begun, or had a place. It lists none: each of these is over alone."""


class GatewayRequests:
    """Of one gateway: those that are not over."""

    def __init__(self) -> None:
        self._asked = Asked()
        """Those that have had no place yet."""
        self.had_place: dict[RequestId, Request] = {}
        """The others: those that run, and few that wait again."""

    def __len__(self) -> int:
        return len(self._asked.requests) + len(self.had_place)

    def begin(self, request: "Request") -> None:
        request.asked = self._asked
        self._asked.requests[request.id] = request

    def placed(self, request: "Request") -> None:
        if request.id not in self.had_place:
            del self._asked.requests[request.id]
            request.asked = NOT_OVER
            self.had_place[request.id] = request

    def leave(self, request: "Request") -> None:
        if self.had_place.pop(request.id, None) is None:
            del self._asked.requests[request.id]

    def let_go(self) -> Asked:
        """Those that have had no place yet are over. Returns them."""
        asked, self._asked = self._asked, Asked()
        asked.over = True
        return asked

    def check(self, requests: Collection["Request"]) -> None:
        """Raises AssertionError if others than these are here, or some where they do not belong."""
        had_place = {one.id: one for one in requests if one.placement or one.left}
        assert self.had_place == had_place, "what had a place was miscounted"
        assert all(one.asked is NOT_OVER for one in had_place.values()), "what had a place would be over with others"
        new = {one.id: one for one in requests if one.id not in had_place}
        assert self._asked.requests == new, "what had no place was miscounted"
        assert all(one.asked is self._asked for one in new.values()), "what waits would not be over with the others"
