"""Who leads, and in which term. This is the local half: a lock file with a counter that survives everything.

A term never repeats: the counter is on disk before anyone hears of it. In a cluster a Lease takes this place (`lease`).
"""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from motet.errors import StateDirectoryError
from motet.terms import is_term


class Leadership(Protocol):
    """The right to act, under a number that no other holder of it has."""

    term: int

    def raise_term_above(self, term: int, then: Callable[[], object]) -> None:
        """Make the term higher than one that somebody reports to have seen.

        `then` is called once it is: the higher term is kept before anyone hears of it, which may take its time.
        """

    def step_down_for(self, term: int) -> None:
        """Somebody says that another leads in this term."""


class Candidacy(Leadership, Protocol):
    """Somebody who leads, or may one day."""

    @property
    def leader_address(self) -> str:
        """Where the leader is reached, as last heard; empty: nobody leads, or nobody knows."""

    @property
    def predecessor(self) -> str:
        """Where somebody may still lead, who has not heard; empty: nobody does."""

    async def wait_until_leader(self) -> None:
        """Wait until this candidate leads."""


class LocalLeadership:
    """Holds the lock of `path` while entered, with a term above every earlier one.

    Entering raises StateDirectoryError when another live process holds the lock. The lock goes with the process,
    however it dies.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self.term = 0

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            self._file = None
            raise StateDirectoryError(
                f"another process leads here: {self._path} is locked. Stop it first, or use another --data-dir."
            ) from None
        self._advance_to(self._read() + 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    leader_address = predecessor = ""

    async def wait_until_leader(self) -> None:
        """Whoever has entered it leads."""

    def step_down_for(self, term: int) -> None:
        """Nobody else can lead while this one holds the lock."""

    def raise_term_above(self, term: int, then: Callable[[], object]) -> None:
        """Make the term higher than one that somebody reports to have seen (a state directory may have been lost)."""
        if term >= self.term:
            self._advance_to(term + 1)
        then()

    def _read(self) -> int:
        assert self._file is not None
        text = os.pread(self._file, 32, 0).strip()
        if not text or is_term(text.decode(errors="replace")):
            return int(text or 0)
        # Damaged. The time is above any counter that restarts alone can have reached.
        return int(time.time())

    def _advance_to(self, term: int) -> None:
        assert self._file is not None
        # Zero-padded, so that every number is as long as the last: the write replaces it in one piece.
        written = os.pwrite(self._file, f"{term:020d}\n".encode(), 0)
        os.ftruncate(self._file, written)  # what a damaged file held beyond it
        os.fsync(self._file)
        self.term = term
