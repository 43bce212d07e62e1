"""Looks at folders that may be on a volume that hangs. Such a look never returns."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

import structlog

from motet.clock import monotonic
from motet.own_thread import OwnThread
from motet.resources import ManifestPosition, Problem
from motet_operator.local.manifest_folder import MISSING, stamp_of

log = structlog.get_logger(__name__)

ANSWER_SECONDS = 5.0
"""How long a look may take until the status says that its folder does not answer. A disk that wakes up takes less."""

MAX_SILENT = 16
"""Each folder that does not answer keeps a thread. With this number of them, only those are looked at that have been
there before."""

SILENT_OF_ONE_VOLUME = 2
"""With this number of silent folders of a file system, no other folder of it is looked at."""

Found = TypeVar("Found")


class FolderLooks:
    """Makes one look after the other in a thread of their own, so that nobody but their caller waits for them."""

    def __init__(self, name: str, folder: Path, changed: Callable[[], None]) -> None:
        self.at = self._folder = folder
        """What the look that runs now looks at: a look at something else than the folder says so."""
        self.problems: tuple[Problem, ...] = ()
        """That the folder does not answer now."""
        self._thread = OwnThread(name)
        self._changed = changed

    async def __call__(self, look: Callable[[], Found]) -> Found:
        """Wait as long as it takes."""
        self.at = self._folder
        answer = asyncio.create_task(self._thread.run(look), name="look at a folder")
        silent = None
        try:
            await asyncio.wait({answer}, timeout=ANSWER_SECONDS)
            if not answer.done():
                silent = self.at
                self._say(_silent(silent))
            return await answer
        finally:
            answer.cancel()
            if silent is not None:
                log.info("folder_answers", path=str(silent))
                self._say()

    def _say(self, *problems: Problem) -> None:
        self.problems = problems
        self._changed()

    def close(self) -> None:
        self._thread.close()


class Seen(NamedTuple):
    """What the latest look at a folder has found."""

    stamp: str
    device: int = 0
    inode: int = 0


class ManyFolders:
    """Looks at many folders, one after the other. One that does not answer holds up the others for a moment, once."""

    def __init__(self, name: str, changed: Callable[[], None]) -> None:
        self.seen: dict[Path, Seen] = {}
        """Of a folder that does not answer: what was there before."""
        self._silent: dict[Path, asyncio.Task[None]] = {}
        self._wanted: Collection[Path] = ()
        """Of the last round: whether others answer is nobody's problem."""
        self._name = name
        self._thread = OwnThread(name)
        self._changed = changed
        self._one_round = asyncio.Lock()

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(_problem(folder) for folder in self._silent_now())

    def is_silent(self, folder: Path) -> bool:
        return folder in self._silent

    async def look(self, folders: Iterable[Path]) -> None:
        """Look at these folders, and forget all others."""
        async with self._one_round:
            self._wanted = wanted = dict.fromkeys(folders)
            self.seen = {folder: seen for folder, seen in self.seen.items() if folder in wanted}
            # First those that have answered: if a new one does not, they have not waited for it.
            left = deque(sorted(wanted, key=lambda folder: folder not in self.seen))
            while left := deque(folder for folder in left if self._may_answer(folder)):
                left = await self._look_until_silence(left)

    async def _look_until_silence(self, folders: deque[Path]) -> deque[Path]:
        """Look at the folders up to one that does not answer. Returns those behind it."""
        one = _Round(folders)
        answer = asyncio.create_task(self._thread.run(one.run), name="look at folders")
        try:
            while not answer.done() and (silent_in := one.began + ANSWER_SECONDS - monotonic()) > 0:
                await asyncio.wait({answer}, timeout=silent_in)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        left, found = one.leave()
        self.seen |= found
        if not answer.done():
            folder = one.at
            self._silent[folder] = answer
            _silent(folder)
            answer.add_done_callback(partial(self._answers, folder))
            self._thread.close()
            self._thread = OwnThread(self._name)
            self._changed()
        else:
            answer.result()
        return left

    def _may_answer(self, folder: Path) -> bool:
        if folder in self._silent:
            return False
        silent, seen = self._silent_now(), self.seen.get(folder)
        if seen is None or not seen.device:  # it may be on any volume
            return len(silent) < MAX_SILENT
        of_its_volume = sum(self.seen[one].device == seen.device for one in silent if one in self.seen)
        return of_its_volume < SILENT_OF_ONE_VOLUME

    def _silent_now(self) -> list[Path]:
        return [folder for folder in self._silent if folder in self._wanted]

    def _answers(self, folder: Path, look: asyncio.Task[None]) -> None:
        del self._silent[folder]
        if not look.cancelled():
            log.info("folder_answers", path=str(folder))
            self._changed()

    def close(self) -> None:
        self._thread.close()
        for answer in self._silent.values():
            answer.cancel()


class _Round:
    """Looks in a thread, which does nothing any more once the loop has left it."""

    def __init__(self, folders: deque[Path]) -> None:
        self._found: dict[Path, Seen] = {}
        self.at = folders[0]
        self.began = monotonic()
        """The look at this folder"""
        self._left = folders
        self._lock = Lock()

    def run(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    return
                self.at, self.began = self._left.popleft(), monotonic()
            seen = _look(self.at)
            with self._lock:
                self._found[self.at] = seen

    def leave(self) -> tuple[deque[Path], dict[Path, Seen]]:
        """The folders that it has not begun with, and what it has found"""
        with self._lock:
            left, self._left = self._left, deque()
            return left, dict(self._found)


def _look(folder: Path) -> Seen:
    stamp = stamp_of(folder)
    if stamp != MISSING:
        with suppress(OSError):
            found = folder.stat()
            return Seen(stamp, found.st_dev, found.st_ino)
    return Seen(MISSING)


def _silent(folder: Path) -> Problem:
    log.warning("folder_silent", path=str(folder), hint="What was last read from it stays in use.")
    return _problem(folder)


def _problem(folder: Path) -> Problem:
    what = "does not answer; what was last read from it stays in use"
    return Problem(ManifestPosition(str(folder), 1, 1), what)
