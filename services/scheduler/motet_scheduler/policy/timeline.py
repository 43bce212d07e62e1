"""What happened to each request, for `Explain`: all known requests, and the last of each tenant that ended.

The number of ended requests is bounded. Timelines are kept in memory only.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from motet.domain import RequestId, Tenant
from motet.last_of_each import LastOfEach
from motet.timeline import Timeline
from motet_scheduler.policy.happenings import Happening

if TYPE_CHECKING:
    from motet_scheduler.policy.requests import Request


class Story(Timeline):
    """What happened to one request here."""

    __slots__ = ("start", "tenant")

    def __init__(self, tenant: Tenant, start: float) -> None:
        super().__init__()
        self.tenant = tenant
        """Whose it is. Empty: nobody has said."""
        self.start = start


class Timelines:
    def __init__(self, ended: int, known: "Mapping[RequestId, Request]") -> None:
        self._known = known
        self._ended: LastOfEach[RequestId, Story] = LastOfEach(ended)

    def __len__(self) -> int:
        return len(self._known) + len(self._ended)

    def begin(self, request: RequestId, tenant: Tenant, now: float) -> Story:
        """Start a request's timeline, or continue the one it had."""
        story = self._ended.pop(request)
        if story is None or story.tenant != tenant:  # nobody reads on under another tenant's name
            story = Story(tenant, now)
        return story

    def end(self, request: "Request") -> None:
        self._ended.add(request.story.tenant, request.id, request.story)

    def note_refused(self, request: RequestId, tenant: Tenant, why: str, now: float) -> None:
        """It has not begun."""
        story = self._ended.get(request)
        if story is None:
            story = Story(tenant, now)
            self._ended.add(tenant, request, story)
        story.add((now, Happening.REFUSED, (why,)))

    def story(self, request: RequestId) -> Story | None:
        """None: the request is unknown or forgotten."""
        known = self._known.get(request)
        return known.story if known is not None else self._ended.get(request)

    def of(self, request: RequestId) -> list[tuple[float, str, str]] | None:
        """(seconds since the first entry, event, detail)."""
        story = self.story(request)
        return None if story is None else [(entry.at - story.start, entry.event, entry.detail) for entry in story]
