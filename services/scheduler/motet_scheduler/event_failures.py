"""Events on which deciding failed. Pure: what to do about a failure, and about the same event when it comes again.

A decision that raises leaves half-changed state and loses what was to be said, so the scheduler begins anew from an
empty state. Its peers then tell everything again, the event that failed included:

| it fails                          | then                                                                     |
|-----------------------------------|--------------------------------------------------------------------------|
| the first time                    | everything begins anew, and the event is handled when it comes again     |
| again, about the same thing       | that too; and nothing of the kind is heard about it for `FORGIVEN_AFTER` |
| `MOST` times within `WITHIN`      | the process ends, and its keeper's pauses apply                          |

Time is what nobody sends, so a tick is never turned away.
"""

from collections import OrderedDict, deque

from motet_scheduler.policy import events

FORGIVEN_AFTER = 60.0
"""Seconds, before the time scale: one event that always fails costs everybody's streams once a minute at most."""

MAX_RESTARTS = 8
RESTART_WINDOW = 60.0
"""Seconds, before the time scale. So many failures are not about one event, and need another start, or a person."""

REMEMBERED = 1024
"""Events that have failed."""

SHOWN = 2000
"""Characters of an event in the log. Prompts and answers never come to the scheduler."""

Subject = tuple[str, str]


class EventFailures:
    def __init__(self, *, time_scale: float = 1.0) -> None:
        self._scale = time_scale
        self._counts: OrderedDict[Subject, int] = OrderedDict()
        self._away_until: dict[Subject, float] = {}
        self._times: deque[float] = deque(maxlen=MAX_RESTARTS)

    def failed(self, event: events.Event, now: float) -> None:
        self._times.append(now)
        if isinstance(event, events.Tick):
            return
        subject = subject_of(event)
        self._counts[subject] = self._counts.get(subject, 0) + 1
        self._counts.move_to_end(subject)
        if self._counts[subject] > 1:
            self._away_until[subject] = now + FORGIVEN_AFTER * self._scale
        if len(self._counts) > REMEMBERED:
            forgotten, _ = self._counts.popitem(last=False)
            self._away_until.pop(forgotten, None)

    def rejects(self, event: events.Event, now: float) -> bool:
        """Whether this event is not handled, because one like it failed again and again."""
        return bool(self._away_until) and self._away_until.get(subject_of(event), now) > now

    def should_give_up(self, now: float) -> bool:
        """Whether beginning anew does not help."""
        return len(self._times) == MAX_RESTARTS and now - self._times[0] <= RESTART_WINDOW * self._scale


def subject_of(event: events.Event) -> Subject:
    """What kind of event it is, and what it is about: a request, or whoever sent it."""
    about = ""
    for name in ("request", "gateway", "instance"):
        about = about or str(getattr(event, name, ""))
    for name in ("identity", "runner"):
        about = about or str(getattr(getattr(event, name, None), "instance", ""))
    return type(event).__name__, about


def shown(event: events.Event) -> str:
    """An event for the log. What adapters are read from is left out: an address may hold a key."""
    if isinstance(event, events.CatalogReplaced | events.CatalogUpdated):
        return f"{type(event).__name__}: {len(event.pools)} pools, {len(event.adapters)} adapters"
    return repr(event)[:SHOWN]
