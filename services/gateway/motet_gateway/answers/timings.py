"""The times of one request's steps, for the server-timing header and the histograms. Pure."""

from motet.clock import Clock
from motet.time_split import TimePart, TimeSplit


class RequestTimings:
    __slots__ = ("_clock", "arrived", "enqueued", "first_token", "last_token", "placed", "split")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.arrived = clock()
        self.split = TimeSplit(TimePart.OVERHEAD, self.arrived)
        """Until its choices are enqueued; then each has its own."""
        self.enqueued = 0.0
        self.placed = 0.0
        self.first_token = 0.0
        self.last_token = 0.0

    def mark_held(self) -> None:
        """It waits for its model."""
        self.split.enter(TimePart.QUEUE, self._clock())

    def mark_ready(self) -> None:
        self.split.enter(TimePart.OVERHEAD, self._clock())

    def take_back(self, ended: TimeSplit) -> None:
        """Of a choice that ended before its first token, because its model was replaced: its time counts for those that
        are enqueued next."""
        self.split = ended.copy()
        self.split.enter(TimePart.OVERHEAD, self.arrived)  # from the end of `ended` on

    def mark_enqueued(self) -> None:
        self.enqueued = self.enqueued or self._clock()

    def mark_placed(self) -> None:
        self.placed = self.placed or self._clock()

    def mark_tokens(self) -> None:
        self.last_token = now = self._clock()
        self.first_token = self.first_token or now

    @property
    def silent_since(self) -> float:
        return self.last_token or self.arrived

    def header(self) -> str:
        """The phases that are over, in milliseconds."""
        phases = (
            ("prepare", self.arrived, self.enqueued),
            ("queue", self.enqueued, self.placed),
            ("prefill", self.placed, self.first_token),
        )
        return ", ".join(f"{name};dur={(end - start) * 1000:.1f}" for name, start, end in phases if start and end)
