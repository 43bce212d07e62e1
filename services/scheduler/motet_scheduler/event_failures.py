"""Counts events whose handling failed, and decides what follows. Pure: no I/O.

A decision that raises an exception leaves half-changed state and loses its effects, so the scheduler starts again from
an empty state. Its peers then send everything again, also the event that failed:

| it fails                                     | then                                                               |
|----------------------------------------------|--------------------------------------------------------------------|
| the first time                               | the state is reset; the event is handled when it comes again       |
| again, about the same subject                | also, this kind of event about it is rejected for `FORGIVEN_AFTER` |
| `MAX_RESTARTS` times within `RESTART_WINDOW` | the process ends, and is started again with increasing pauses      |

A tick is never rejected, nor what continues an event: no peer sends it.
"""

from collections import OrderedDict, deque

from motet_scheduler.policy import events

FORGIVEN_AFTER = 60.0
"""Seconds, before the time scale: an event that always fails ends all streams at most once a minute."""

MAX_RESTARTS = 8
"""This number of failures has another cause than one event: a new process may help."""
RESTART_WINDOW = 60.0
"""Seconds, before the time scale."""

REMEMBERED = 1024
"""Events that have failed and are remembered."""

SHOWN = 2000
"""Characters of an event in the log. Prompts and answers never come to the scheduler."""

Subject = tuple[str, str]


class EventFailures:
    def __init__(self, *, time_scale: float = 1.0) -> None:
        self._scale = time_scale
        self.counts: OrderedDict[Subject, int] = OrderedDict()
        self.rejected_until: dict[Subject, float] = {}
        self._times: deque[float] = deque(maxlen=MAX_RESTARTS)

    def failed(self, event: events.Event, now: float) -> None:
        self._times.append(now)
        if isinstance(event, events.Tick | events.TryMore):
            return
        subject = subject_of(event)
        self.counts[subject] = self.counts.get(subject, 0) + 1
        self.counts.move_to_end(subject)
        if self.counts[subject] > 1:
            self.rejected_until[subject] = now + FORGIVEN_AFTER * self._scale
        if len(self.counts) > REMEMBERED:
            forgotten, _ = self.counts.popitem(last=False)
            self.rejected_until.pop(forgotten, None)

    def rejects(self, event: events.Event, now: float) -> bool:
        """Whether this event is not handled, because its subject failed repeatedly."""
        return bool(self.rejected_until) and self.rejected_until.get(subject_of(event), now) > now

    def should_give_up(self, now: float) -> bool:
        """Whether there were too many restarts in a short time."""
        return len(self._times) == MAX_RESTARTS and now - self._times[0] <= RESTART_WINDOW * self._scale


def subject_of(event: events.Event) -> Subject:
    """The kind of event, and what it is about: a request, or the peer that sent it."""
    about = ""
    for name in ("request", "gateway", "instance"):
        about = about or str(getattr(event, name, ""))
    for name in ("identity", "runner"):
        about = about or str(getattr(getattr(event, name, None), "instance", ""))
    return type(event).__name__, about


def shown(event: events.Event) -> str:
    """An event for the log. The addresses of adapters are left out, since they may contain a key."""
    if isinstance(event, events.CatalogReplaced | events.CatalogUpdated):
        return f"{type(event).__name__}: {len(event.pools)} pools, {len(event.adapters)} adapters"
    return repr(event)[:SHOWN]
