"""What happened to each request, for `Explain`: all known requests, and the last of each tenant that ended.

The number of ended requests is bounded. Timelines are kept in memory only.
"""

from motet.domain import RequestId, Tenant
from motet.last_of_each import LastOfEach
from motet.timeline import Noted, Timeline


class Story(Timeline):
    """What happened to one request here."""

    __slots__ = ("start", "tenant")

    def __init__(self, tenant: Tenant, start: float) -> None:
        super().__init__()
        self.tenant = tenant
        """Whose it is. Empty: nobody has said."""
        self.start = start


class Timelines:
    def __init__(self, ended: int) -> None:
        self._known: dict[RequestId, Story] = {}
        self._ended: LastOfEach[RequestId, Story] = LastOfEach(ended)

    def __len__(self) -> int:
        return len(self._known) + len(self._ended)

    def begin(self, request: RequestId, tenant: Tenant, now: float) -> None:
        """Start a request's timeline, or continue the one it had."""
        story = self._ended.pop(request)
        if story is None or story.tenant != tenant:  # nobody reads on under another tenant's name
            story = Story(tenant, now)
        self._known[request] = story

    def end(self, request: RequestId) -> None:
        story = self._known.pop(request, None)
        if story is not None:
            self._ended.add(story.tenant, request, story)

    def note(self, request: RequestId, entry: Noted, tenant: Tenant) -> None:
        """`tenant`: whose it is, if it may be unknown."""
        story = self._known.get(request) or self._ended.get(request)
        if story is None:
            story = Story(tenant, entry[0])
            self._ended.add(tenant, request, story)
        story.add(entry)

    def story(self, request: RequestId) -> Story | None:
        """None: the request is unknown or forgotten."""
        return self._known.get(request) or self._ended.get(request)

    def of(self, request: RequestId) -> list[tuple[float, str, str]] | None:
        """(seconds since the first entry, event, detail)."""
        story = self.story(request)
        return None if story is None else [(entry.at - story.start, entry.event, entry.detail) for entry in story]
