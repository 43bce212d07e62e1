"""Looks at folders that may be on a volume that hangs. Such a look never returns."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

import structlog

from motet.clock import monotonic
from motet.own_thread import OwnThread
from motet.resources import ManifestPosition, Problem
from motet_operator.local import pauses
from motet_operator.local.manifest_folder import MISSING, Debouncer, stamp_of

log = structlog.get_logger(__name__)

ANSWER_SECONDS = 5.0
"""How long a look may take until the status says that its folder does not answer. A disk that wakes up takes less."""

SLOW_SECONDS = 0.5
"""How long a look at one of many folders may hold up those at the others."""

MAX_SLOW = 16
"""With this number of looks that take longer, only those folders are looked at that have been there before."""

MAX_THREADS = 64
"""Each look that takes longer keeps a thread. The same with this number of them, and those at folders that nobody names
any more count, too."""

SLOW_OF_ONE_VOLUME = 2
"""With this number of looks at a file system that take longer, no other folder of it is looked at."""

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
            if silent is not None and not answer.cancelled():
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


@dataclass(slots=True)
class _SlowLook:
    answer: asyncio.Task[None]
    device: int
    """Of its volume, as far as it is known"""
    silent: bool = False
    """The folder does not answer."""


class ManyFolders:
    """Looks at many folders, one after the other. A slow one holds up the others for a moment: then its look has a
    thread alone."""

    def __init__(
        self, name: str, changed: Callable[[], None], *, quiet_seconds: float = 0.0, poll_seconds: float = 1.0
    ) -> None:
        self.stamps: dict[Path, str] = {}
        """What has stayed as it was for a moment. Of a folder that does not answer: what was there before."""
        self._seen: dict[Path, Seen] = {}
        """What was looked at last comes last."""
        self._slow: dict[Path, _SlowLook] = {}
        self._asked: Collection[Path] = ()
        self._asked_now, self._told = asyncio.Event(), asyncio.Event()
        self._wanted: Collection[Path] = ()
        """Of the last round: whether others answer is nobody's problem."""
        self._name = name
        self._thread = OwnThread(name)
        self._changed = changed
        self._debouncer = Debouncer(quiet_seconds)
        self._poll_seconds = poll_seconds
        self._cpu_seconds = 0.0
        """Of the looks since the last pause, as far as they have ended"""

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(_problem(folder) for folder, look in self._slow.items() if look.silent and folder in self._wanted)

    def want(self, folders: Iterable[Path]) -> None:
        """From now on look at these folders, and forget all others."""
        self._asked = dict.fromkeys(folders)
        self._asked_now.set()

    async def each_seen(self) -> None:
        """Returns when each folder that is wanted has been looked at or does not answer."""
        while not all(folder in self.stamps or self._is_silent(folder) for folder in self._asked):
            self._told.clear()
            await self._told.wait()

    async def run(self) -> None:
        while True:
            self._asked_now.clear()
            self._cpu_seconds = 0.0
            await self.look()
            pause = pauses.AT_FOLDERS.after(self._cpu_seconds)
            with suppress(TimeoutError):
                # A change that rests in a folder with a slow look is not seen earlier if others are looked at often.
                next_look = self._debouncer.next_look(self._poll_seconds, without=self._slow)
                async with asyncio.timeout(max(next_look, pause)):
                    await self._asked_now.wait()

    async def look(self) -> None:
        """One round. Looks that are slow may end later."""
        wanted = self._asked
        if wanted is not self._wanted:  # mostly nothing is to be forgotten, of thousands
            self._wanted = wanted
            own = {folder: folder for folder in wanted}  # to compare a path with itself takes no time
            self._seen = {own[folder]: seen for folder, seen in self._seen.items() if folder in own}
            self.stamps = {own[folder]: stamp for folder, stamp in self.stamps.items() if folder in own}
            self._debouncer.forget(wanted)
        # First those that have answered: if a new one does not, they have not waited for it. Of a slow volume, all have
        # their turns.
        left = deque([*self._seen, *(folder for folder in wanted if folder not in self._seen)])
        while left := deque(folder for folder in left if self._may_answer(folder)):
            left = await self._look_until_slow(left)

    async def _look_until_slow(self, folders: deque[Path]) -> deque[Path]:
        """Look at the folders up to one that takes long. Returns those behind it."""
        one = _Round(folders)
        answer = asyncio.create_task(self._thread.run(one.run), name="look at folders")
        try:
            while not answer.done() and not one.leave_if_slow():
                await asyncio.wait({answer}, timeout=one.began + SLOW_SECONDS - monotonic())
                if not answer.done() and one.began + SLOW_SECONDS > monotonic():
                    self._publish(one)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        if answer.done():
            answer.result()
            self._cpu_seconds += one.cpu_seconds
        else:
            self._leave_alone(one, answer)
        self._publish(one, also=self._is_silent(one.at))
        return one.left_over

    def _leave_alone(self, one: "_Round", answer: asyncio.Task[None]) -> None:
        self._thread.close()
        self._thread = OwnThread(self._name)
        slow = self._slow[one.at] = _SlowLook(answer, self._seen.get(one.at, UNSEEN).device)
        timer = None
        if (seconds := one.began + ANSWER_SECONDS - monotonic()) > 0:
            timer = asyncio.get_running_loop().call_later(seconds, self._is_late, one.at, slow)
        else:
            self._note_silent(one.at, slow)
        answer.add_done_callback(partial(self._answers, one, timer))

    def _is_late(self, folder: Path, look: _SlowLook) -> None:
        self._note_silent(folder, look)
        self._tell()

    @staticmethod
    def _note_silent(folder: Path, look: _SlowLook) -> None:
        look.silent = True
        _silent(folder)

    def _is_silent(self, folder: Path) -> bool:
        return folder in self._slow and self._slow[folder].silent

    def _publish(self, one: "_Round", *, also: bool = False) -> None:
        """What was found since the last time. `also`: something else has changed."""
        before, now = self.stamps, monotonic()
        found = {folder: seen for folder, seen in one.take().items() if folder in self._wanted}
        for folder, seen in found.items():
            self._seen.pop(folder, None)
            self._seen[folder] = seen
        self.stamps = before | {folder: self._debouncer(folder, seen.stamp, now) for folder, seen in found.items()}
        if also or self.stamps != before:
            self._tell()

    def _tell(self) -> None:
        self._told.set()
        self._changed()

    def _may_answer(self, folder: Path) -> bool:
        if not self._slow:
            return True
        if folder in self._slow:
            return False
        seen = self._seen.get(folder)
        if seen is None or not seen.device:  # it may be on any volume
            slow = sum(one in self._wanted for one in self._slow)
            return slow < MAX_SLOW and len(self._slow) < MAX_THREADS
        return sum(look.device == seen.device for look in self._slow.values()) < SLOW_OF_ONE_VOLUME

    def _answers(self, one: "_Round", timer: asyncio.TimerHandle | None, answer: asyncio.Task[None]) -> None:
        look = self._slow.pop(one.at)
        if timer is not None:
            timer.cancel()
        if not answer.cancelled():
            if look.silent:
                log.info("folder_answers", path=str(one.at))
            self._publish(one, also=look.silent)

    def close(self) -> None:
        self._thread.close()
        for look in self._slow.values():
            look.answer.cancel()


class _Round:
    """Looks in a thread, which does nothing any more once it was too slow."""

    def __init__(self, folders: deque[Path]) -> None:
        self.at = folders[0]
        self.began = monotonic()
        """The look at this folder"""
        self.left_over: deque[Path] = deque()
        """The folders that it has not begun with when it was left"""
        self.cpu_seconds = 0.0
        """Of its thread; known at the end"""
        self._left = folders
        self._found: dict[Path, Seen] = {}
        self._lock = Lock()

    def run(self) -> None:
        began = time.thread_time()
        while True:
            with self._lock:
                if not self._left:
                    self.cpu_seconds = time.thread_time() - began
                    return
                self.at, self.began = self._left.popleft(), monotonic()
            seen = _look(self.at)
            with self._lock:
                self._found[self.at] = seen

    def leave_if_slow(self) -> bool:
        with self._lock:  # it does not go on to the next folder meanwhile
            if monotonic() < self.began + SLOW_SECONDS:
                return False
            self.left_over, self._left = self._left, self.left_over
            return True

    def take(self) -> dict[Path, Seen]:
        with self._lock:
            found, self._found = self._found, {}
            return found


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
