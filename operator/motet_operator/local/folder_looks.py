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
from motet_operator.local.manifest_folder import MISSING, Debouncer, stamp_of

log = structlog.get_logger(__name__)

ANSWER_SECONDS = 5.0
"""How long a look may take until the status says that its folder does not answer. A disk that wakes up takes less."""

MAX_SILENT = 16
"""With this number of folders that do not answer, only those are looked at that have been there before."""

MAX_THREADS = 64
"""Each folder that does not answer keeps a thread. The same with this number of them, and those that nobody names any
more count, too."""

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


UNSEEN = Seen(MISSING)


class ManyFolders:
    """Looks at many folders, one after the other. One that does not answer holds up the others for a moment, once."""

    def __init__(
        self, name: str, changed: Callable[[], None], *, quiet_seconds: float = 0.0, poll_seconds: float = 1.0
    ) -> None:
        self.stamps: dict[Path, str] = {}
        """What has stayed as it was for a moment. Of a folder that does not answer: what was there before."""
        self._seen: dict[Path, Seen] = {}
        self._silent: dict[Path, tuple[asyncio.Task[None], int]] = {}
        """Each with its volume, as far as it is known."""
        self._asked: Collection[Path] = ()
        self._asked_now, self._looked = asyncio.Event(), asyncio.Event()
        self._wanted: Collection[Path] = ()
        """Of the last round: whether others answer is nobody's problem."""
        self._name = name
        self._thread = OwnThread(name)
        self._changed = changed
        self._debouncer = Debouncer(quiet_seconds)
        self._poll_seconds = poll_seconds

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(_problem(folder) for folder in self._silent_now())

    def want(self, folders: Iterable[Path]) -> asyncio.Event:
        """From now on look at these folders, and forget all others. Returns what is set when each of them has been
        looked at or does not answer."""
        self._asked = dict.fromkeys(folders)
        self._asked_now.set()
        return self._looked

    async def run(self) -> None:
        while True:
            self._asked_now.clear()
            looked, self._looked = self._looked, asyncio.Event()
            await self.look()
            looked.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._debouncer.next_look(self._poll_seconds)):
                    await self._asked_now.wait()

    async def look(self) -> None:
        """One round"""
        self._wanted = wanted = self._asked
        self._seen = {folder: seen for folder, seen in self._seen.items() if folder in wanted}
        self.stamps = {folder: stamp for folder, stamp in self.stamps.items() if folder in wanted}
        self._debouncer.forget(wanted)
        # First those that have answered: if a new one does not, they have not waited for it.
        left = deque(sorted(wanted, key=lambda folder: folder not in self._seen))
        while left := deque(folder for folder in left if self._may_answer(folder)):
            left = await self._look_until_silence(left)

    async def _look_until_silence(self, folders: deque[Path]) -> deque[Path]:
        """Look at the folders up to one that does not answer. Returns those behind it."""
        one = _Round(folders)
        answer = asyncio.create_task(self._thread.run(one.run), name="look at folders")
        try:
            while not answer.done() and not one.leave_if_silent():
                await asyncio.wait({answer}, timeout=one.began + ANSWER_SECONDS - monotonic())
        except asyncio.CancelledError:
            answer.cancel()
            raise
        if answer.done():
            answer.result()
        else:
            self._silent[one.at] = answer, self._seen.get(one.at, UNSEEN).device
            _silent(one.at)
            answer.add_done_callback(partial(self._answers, one.at))
            self._thread.close()
            self._thread = OwnThread(self._name)
        before, found, now = self.stamps, one.found(), monotonic()
        self._seen |= found
        self.stamps = before | {folder: self._debouncer(folder, seen.stamp, now) for folder, seen in found.items()}
        if not answer.done() or self.stamps != before:
            self._changed()
        return one.left_over

    def _may_answer(self, folder: Path) -> bool:
        if folder in self._silent:
            return False
        seen = self._seen.get(folder)
        if seen is None or not seen.device:  # it may be on any volume
            return len(self._silent_now()) < MAX_SILENT and len(self._silent) < MAX_THREADS
        return sum(device == seen.device for _, device in self._silent.values()) < SILENT_OF_ONE_VOLUME

    def _silent_now(self) -> list[Path]:
        return [folder for folder in self._silent if folder in self._wanted]

    def _answers(self, folder: Path, look: asyncio.Task[None]) -> None:
        del self._silent[folder]
        if not look.cancelled():
            log.info("folder_answers", path=str(folder))
            self._changed()

    def close(self) -> None:
        self._thread.close()
        for answer, _ in self._silent.values():
            answer.cancel()


class _Round:
    """Looks in a thread, which does nothing any more once it was too slow."""

    def __init__(self, folders: deque[Path]) -> None:
        self.at = folders[0]
        self.began = monotonic()
        """The look at this folder"""
        self.left_over: deque[Path] = deque()
        """The folders that it has not begun with when it was left"""
        self._left = folders
        self._found: dict[Path, Seen] = {}
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

    def leave_if_silent(self) -> bool:
        with self._lock:  # it does not go on to the next folder meanwhile
            if monotonic() < self.began + ANSWER_SECONDS:
                return False
            self.left_over, self._left = self._left, self.left_over
            return True

    def found(self) -> dict[Path, Seen]:
        with self._lock:
            return dict(self._found)


def _look(folder: Path) -> Seen:
    stamp = stamp_of(folder)
    if stamp != MISSING:
        with suppress(OSError):
            return Seen(stamp, folder.stat().st_dev)
    return UNSEEN


def _silent(folder: Path) -> Problem:
    log.warning("folder_silent", path=str(folder), hint="What was last read from it stays in use.")
    return _problem(folder)


def _problem(folder: Path) -> Problem:
    what = "does not answer; what was last read from it stays in use"
    return Problem(ManifestPosition(str(folder), 1, 1), what)
