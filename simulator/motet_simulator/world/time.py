"""Virtual time: what happens next, in which process. Time jumps from one event to the next."""

import heapq
import itertools
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
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, when: float, do: Callable[..., None], *args: Any) -> None:
        """Do it at this time, or now if that has passed."""
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), do, args))

    def after(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, do, *args)

    def run(self, until: float) -> None:
        """Let time pass until then."""
        events, at_once = self._events, 0
        while events and events[0][0] <= until:
            when, _, do, args = heapq.heappop(events)
            at_once = 0 if when > self.now else at_once + 1
            if at_once > MAX_TURNS_AT_ONCE:
                owner = getattr(do, "__self__", None)
                last = f"{do}{args}" if owner is None else f"of {owner!r}"
                raise TimeStandsStill(f"time stands still, the last event was {last}")
            self.now = when
            do(*args)
        self.now = max(self.now, until)

    def draw(self, *of: object) -> float:
        """A number from 0 to below 1, always the same for the same `of`."""
        digest = blake2b(repr((self.seed, of)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64
