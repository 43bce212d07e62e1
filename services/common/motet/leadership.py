"""Who leads, and in which term. On one machine this is a lock file that contains the last term.

A term never repeats: it is on disk before any other process learns it. In a cluster a Lease is used instead (`lease`).
"""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from motet.disk import LockedFile
from motet.errors import StateDirectoryError
from motet.surroundings import Surroundings
from motet.terms import is_term


class Leadership(Protocol):
    """The right to act as the leader, under a term that no other leader has."""

    term: int

    def raise_term_above(self, term: int, then: Callable[[], object]) -> None:
        """Make the term higher than `term`, which a peer has seen.

        Calls `then` once it is higher. That may take time: the higher term is stored before it is used.
        """

    def step_down_for(self, term: int) -> None:
        """A peer says that another process leads in this term."""


class Candidacy(Leadership, Protocol):
    """A process that leads, or waits until it can lead."""

    @property
    def leader_address(self) -> str:
        """The last known address of the leader. Empty: there is no leader, or it is not known."""

    @property
    def predecessor(self) -> str:
        """The address of an earlier leader that may not know yet that it no longer leads. Empty: there is none."""

    async def wait_until_leader(self) -> None:
        """Wait until this candidate leads."""


class LocalLeadership:
    """A context manager that holds the lock of `path`, with a term above every earlier one.

    Entering raises StateDirectoryError when another process holds the lock. The kernel releases the lock when the
    process ends, also when it is killed.
    """

    def __init__(self, path: Path, surroundings: Surroundings) -> None:
        self._path = path
        self._around = surroundings
        self._file: LockedFile | None = None
        self.term = 0

    def __enter__(self) -> Self:
        try:
            self._file = self._around.disk.lock(self._path)
        except BlockingIOError:
            raise StateDirectoryError(
                f"another process already leads: it has locked {self._path}. Stop it first, or use another --data-dir."
            ) from None
        self._advance_to(self._read() + 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    leader_address = predecessor = ""

    async def wait_until_leader(self) -> None:
        """Returns at once: a process that has entered the context leads."""

    def step_down_for(self, term: int) -> None:
        """Does nothing: no other process can lead while this one holds the lock."""

    def raise_term_above(self, term: int, then: Callable[[], object]) -> None:
        """Make the term higher than `term`, which a peer has seen. That happens when the state directory was lost."""
        if term >= self.term:
            self._advance_to(term + 1)
        then()

    def _read(self) -> int:
        assert self._file is not None
        text = self._file.read().strip()
        if not text or is_term(text.decode(errors="replace")):
            return int(text or 0)
        # The file is damaged. The time in seconds is higher than any term that restarts alone can have reached.
        return int(self._around.wall())

    def _advance_to(self, term: int) -> None:
        assert self._file is not None
        # With leading zeros all numbers have the same length, so one write replaces the old number completely.
        self._file.write(f"{term:020d}\n".encode())
        self.term = term
