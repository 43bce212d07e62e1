"""The requests of each gateway.

When a gateway goes, a hundred thousand of its requests may wait. Even to look at all of them would delay everything
else. So they are put aside as they are, and each event ends some.
"""

from collections.abc import Iterable

from motet.domain import RequestId
from motet_scheduler.policy.requests import Request

Asked = dict[RequestId, Request]


class GatewayRequests:
    def __init__(self) -> None:
        self._asked: dict[str, Asked] = {}
        self._left: dict[str, Asked] = {}
        """By gateways that have gone: what they had then, and nobody has looked at since. What waits is over."""

    def add(self, request: Request) -> None:
        self._asked.setdefault(request.gateway, {})[request.id] = request

    def remove(self, request: Request) -> None:
        for by_gateway in (self._asked, self._left):
            asked = by_gateway.get(request.gateway)
            if asked is not None and asked.pop(request.id, None) is not None and not asked:
                del by_gateway[request.gateway]

    def of(self, gateway: str) -> Iterable[Request]:
        """But for those that are left since it went."""
        return self._asked.get(gateway, {}).values()

    def gateway_came(self, gateway: str) -> None:
        """It says what came of what it had."""
        if (left := self._left.pop(gateway, None)) is not None:
            left.update(self._asked.get(gateway, {}))
            self._asked[gateway] = left

    def gateway_went(self, gateway: str) -> None:
        asked = self._asked.pop(gateway, {})
        if gateway in self._left:
            self._left[gateway].update(asked)  # few, as it did not come again
        elif asked:
            self._left[gateway] = asked

    def is_over(self, request: Request) -> bool:
        return bool(self._left) and request.waiting and request.id in self._left.get(request.gateway, {})

    @property
    def some_are_over(self) -> bool:
        """Or run."""
        return bool(self._left)

    def look_at_next(self) -> Request:
        """At one that is left. If it runs, it stays: it may be over when its gateway comes again."""
        gateway, left = next(iter(self._left.items()))
        _, request = left.popitem()
        if not left:
            del self._left[gateway]
        if request.waiting:
            request.forgotten = True
        else:
            self.add(request)
        return request
