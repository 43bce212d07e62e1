"""Quantiles of many times in little memory: each is counted in a bucket that is one percent wide."""

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

_BUCKETS_PER_E = 100


@dataclass(slots=True)
class Gaps:
    of_moves: list[float] = field(default_factory=list)
    """Those in which an answer has moved to another runner, one by one."""
    _counts: Counter[int] = field(default_factory=Counter)
    _newest: float = field(default=0.0, compare=False)
    _bucket: int = field(default=0, compare=False)
    """Of the newest. The sequences of an iteration mostly have the same."""

    def add(self, seconds: float, count: int = 1) -> None:
        if seconds > 0:
            if seconds != self._newest:
                self._newest, self._bucket = seconds, math.floor(math.log(seconds) * _BUCKETS_PER_E)
            self._counts[self._bucket] += count

    def __len__(self) -> int:
        return sum(self._counts.values())

    def quantile(self, share: float) -> float:
        """Seconds that this share of all times does not exceed, within a percent; 0 if there are none."""
        buckets = sorted(self._counts)
        total = len(self)
        for bucket, seen in zip(buckets, accumulate(self._counts[one] for one in buckets), strict=True):
            if seen >= share * total:
                return math.exp((bucket + 0.5) / _BUCKETS_PER_E)
        return 0.0
