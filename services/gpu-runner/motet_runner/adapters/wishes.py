"""Wishes for room in a disk cache that runners share. No runner removes what another one has leased, also when nobody
uses it: so one that lacks room says so, in a file beside the cache, and the others let go of what they do not use."""

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

WISHES = ".wishes"
"""The end of the name of the folder, which is beside the cache. It has a file for each runner that wishes."""

WISH_SECONDS = 60.0
"""A fetch that gets no room is tried again, and wishes again: an older wish was granted, or its runner has ended."""

_DIGITS = 20


class Wishes:
    def __init__(self, cache: Path) -> None:
        self._folder = Path(os.path.realpath(cache) + WISHES)
        self._own = secrets.token_hex(8)

    def make(self, size: int) -> None:
        """For `size` bytes. Raises OSError."""
        self._folder.mkdir(exist_ok=True)
        (self._folder / self._own).write_text(str(size))

    def of_others(self) -> int:
        """The bytes that others wish for now. Raises OSError."""
        total, oldest = 0, time.time() - WISH_SECONDS
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 - no paths are needed
        except FileNotFoundError:
            return 0
        for path in [self._folder / name for name in names if name != self._own]:
            with suppress(FileNotFoundError, ValueError):  # it has gone, or is just being written
                if path.stat().st_mtime < oldest:
                    path.unlink()
                else:
                    total += int(path.read_text()[:_DIGITS])
        return total
