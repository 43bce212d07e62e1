"""How busy the machine's cores were.

What a lane counts leaves out processes that a test lets another process end: those of a local stack, above all. And a
lane that seems to wait may wait for a core. With idle cores, another lane could run beside the others.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

STAT = Path("/proc/stat")


@dataclass(frozen=True)
class CoreTime:
    """Since the machine's start, of all cores together, in clock ticks."""

    all: int
    idle: int

    @classmethod
    def now(cls) -> Self | None:
        """None: this machine does not say it."""
        try:
            return cls.of(STAT.read_text())
        except OSError:
            return None

    @classmethod
    def of(cls, stat: str) -> Self:
        name, *ticks = stat.partition("\n")[0].split()
        assert name == "cpu"
        # The times of guests, which follow, are in those of users already.
        _user, _nice, _system, idle, waits, *_ = counted = [int(one) for one in ticks[:8]]
        return cls(sum(counted), idle + waits)

    def busy_since(self, before: "CoreTime") -> float:
        """The share of the time, from 0 to 1."""
        return 1 - (self.idle - before.idle) / max(1, self.all - before.all)
