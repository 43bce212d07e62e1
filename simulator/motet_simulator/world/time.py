"""Virtual time: what happens next, in which process. Time jumps from one event to the next."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

MAX_TURNS_AT_ONCE = 200_000
"""This many turns without any time passing mean that processes wake each other for ever."""


class TimeStandsStill(Exception):
    """Processes work without end, and no time passes."""


class World:
    """Events in order of time; events of one time in the order in which they were made.

    `seed` decides all that is drawn. A draw is a hash of the seed and of what it is for, so another draw more or less
    changes no other.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.turns = 0
        self.on_met: Callable[[str, str], None] = lambda *_: None
        """Called when something meets a fault that lasts: its kind, and where it is."""
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        """Of later times. A heap."""
        self._at_once: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()
        """Of now: most are, and a queue costs less."""

    def at(self, when: float, do: Callable[..., None], *args: Any) -> None:
        """Do it at this time, or now if that has passed."""
        if when <= self.now:
            self._at_once.append((next(self._numbers), do, args))
        else:
            heapq.heappush(self._events, (when, next(self._numbers), do, args))

    def after(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, do, *args)

    def run(self, until: float) -> None:
        """Let time pass until then."""
        events, now_due, turns = self._events, self._at_once, 0
        while True:
            if now_due and not (events and events[0][0] <= self.now and events[0][1] < now_due[0][0]):
                _, do, args = now_due.popleft()
                turns += 1
            elif events and events[0][0] <= until:
                when, _, do, args = heapq.heappop(events)
                turns = 0 if when > self.now else turns + 1
                self.now = when
            else:
                break
            if turns > MAX_TURNS_AT_ONCE:
                owner = getattr(do, "__self__", None)
                last = f"{do}{args}" if owner is None else f"of {owner!r}"
                raise TimeStandsStill(f"time stands still, the last event was {last}")
            do(*args)
        self.now = max(self.now, until)

    def draw(self, *of: object) -> float:
        """A number from 0 to below 1, always the same for the same `of`."""
        digest = blake2b(repr((self.seed, of)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64
