"""What a new leader still waits for from the scheduler, and for how long. Pure.

A scheduler says of each group when it has reported everything. Until then, what it has not named is as the last leader
left it. The wait for that ends `AWAITED_SECONDS` after a scheduler has begun to speak: one of the release before never
says it. As long without any scheduler ends only the wait for advice: nobody knows any more how many runners are needed,
but what runners hold has not changed.
"""

from collections.abc import Collection, Iterable

from motet.domain import ObjectName

AWAITED_SECONDS = 150.0
"""Longer than a scheduler waits for its runners, and for the checks of adapters."""


class AwaitedReports:
    def __init__(self, patience: float = AWAITED_SECONDS) -> None:
        self._patience = patience
        self._silent_since: float | None = None
        """When the lead began, or later the last scheduler that has spoken was lost."""
        self._spoken_since: float | None = None
        """When the scheduler of the current stream said its first word."""
        self._reported: set[ObjectName] = set()
        self._gave_up = False

    def leader_begins(self, now: float) -> None:
        self._silent_since = now

    def scheduler_speaks(self, now: float) -> None:
        """A stream to a scheduler that leads has begun, or it says again that it leads."""
        if self._spoken_since is None:
            self._spoken_since = now

    def stream_closed(self, now: float) -> None:
        if self._spoken_since is not None:
            self._silent_since = now
        self._spoken_since = None

    def reported_all(self, groups: Iterable[ObjectName]) -> None:
        self._reported.update(groups)

    def keep_only(self, groups: Collection[ObjectName]) -> None:
        """Of a group that comes back, the scheduler says it again."""
        self._reported.intersection_update(groups)

    def reported_groups(self, now: float) -> frozenset[ObjectName] | None:
        """The groups of which it has reported everything; None: of all, or the wait for the others is over."""
        if self._spoken_since is not None and now - self._spoken_since >= self._patience:
            self._gave_up = True
        return None if self._gave_up else frozenset(self._reported)

    def advice_is_awaited(self, now: float) -> bool:
        """Whether a pool without advice that counts now may still follow that of before."""
        return self._silent_since is None or now - self._silent_since < self._patience

    def ends_in(self, now: float) -> float | None:
        """Seconds until the next of these waits is over; None: time alone ends none."""
        began = [self._silent_since, None if self._gave_up else self._spoken_since]
        left = [since + self._patience - now for since in began if since is not None]
        return min((each for each in left if each > 0), default=None)
