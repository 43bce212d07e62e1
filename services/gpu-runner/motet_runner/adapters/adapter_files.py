"""The origin and the place of the registry's adapters: sources, and the disk cache of this runner.

Everything that may hang runs in threads, and for a limited time only.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Protocol, TypeVar

import structlog

from motet.errors import Internal, MotetError
from motet.runner_info import Failure
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.checks import Checks
from motet_runner.adapters.fetches import Fetches
from motet_runner.adapters.policy import effects
from motet_runner.adapters.policy.values import CacheContents, FetchRequest, Held
from motet_runner.adapters.proof import Proof
from motet_runner.daemon_threads import CallHangs, DaemonThreads
from motet_runner.sources.fetch_errors import temporary
from motet_runner.sources.process_pool import Room
from motet_runner.sources.source_access import Sources

log = structlog.get_logger(__name__)

T = TypeVar("T")

FILE_THREADS = 4
"""Threads for checks, and for storing fetched files: each reads a whole adapter from the runner's disk."""


class AdapterFiles(Protocol):
    """Carries out the effects of `AdapterPolicy`: `effects` defines the answers of the methods with the same names. If
    a method raises an error, `failure_of` makes the answer."""

    async def find(self, effect: effects.Find) -> Held | None: ...

    async def fetch(self, effect: effects.Fetch, room: Room | None = None) -> Held:
        """`room`: awaited before files of this many bytes are written. None: there is room for all."""

    def bytes_of(self, number: int) -> int:
        """How many bytes have been fetched, while the fetch of this number runs."""

    async def check(self, held: Held) -> Certification: ...

    async def keep_proof(self, held: Held, proof: Proof) -> None:
        """Keep a proof beside the certificate, for the next start. Not if the disk takes no more."""

    async def forget_proofs(self, held: Held) -> None:
        """Those of all engines: the next one must prove the adapter before it serves."""

    async def evict(self, effect: effects.Evict) -> effects.Answer: ...

    async def contents(self, effect: effects.ListCache) -> CacheContents: ...

    async def wish(self, size: int) -> None:
        """Ask the other runners of the cache for room."""

    async def wished(self) -> bool:
        """Whether another runner asks for room."""

    async def look(self, held: Held, *, begins: Callable[[], None]) -> bool:
        """Record that the folder was used. True if it is still at its place. `begins` is called just before the disk is
        read."""

    async def vanished(self, held: Sequence[Held]) -> list[Held]:
        """Those whose folder is no longer at its place. One that cannot be looked at counts as if it were there."""

    def release(self, held: Held) -> None:
        """Releases a lease without waiting."""

    async def forget_partial(self, request: FetchRequest) -> None: ...

    async def clear_partial(self) -> None:
        """Remove the files of fetches that will not be continued."""


class DiskAdapterFiles(Fetches):
    def __init__(self, cache: DiskCache, checks: Checks, sources: Sources) -> None:
        threads = DaemonThreads("adapter files", FILE_THREADS, seconds=sources.disk_stall_seconds)
        super().__init__(cache, sources, threads)
        self.checks = checks
        # One thread, so that a touch comes before a later listing.
        self.folders = DaemonThreads("adapter folders", 1, seconds=sources.disk_stall_seconds)

    async def find(self, effect: effects.Find) -> Held | None:
        return await self._in_folders(partial(self._find, effect))

    def _find(self, effect: effects.Find) -> Held | None:
        held = self.cache.find(effect.digest, effect.request)
        if held is None:
            return None
        try:
            return replace(held, certification=self.checks.earlier(held))
        except BaseException:
            held.lease.release()
            raise

    async def check(self, held: Held) -> Certification:
        certify = partial(self.checks.certify, held)
        return await self.threads.run(certify, seconds=self.sources.disk_seconds(held.bytes))

    async def keep_proof(self, held: Held, proof: Proof) -> None:
        await self._in_folders(partial(self.checks.keep_proof, held, proof))

    async def forget_proofs(self, held: Held) -> None:
        self.checks.found_wrong(held.digest)  # at once, also if the disk hangs
        await self._in_folders(partial(self.checks.forget_proofs, held))

    async def evict(self, effect: effects.Evict) -> effects.Answer:
        try:
            return await self._in_folders(partial(self._evict, effect))
        except CallHangs:
            if effect.held is not None:
                self.release(effect.held)
            return None  # the folder may go later, or stay for another process: this runner treats it as removed

    def _evict(self, effect: effects.Evict) -> effects.Answer:
        if self.cache.evict(effect.digest, effect.held):
            log.info("adapter_evicted_from_disk", adapter=effect.digest)
            return None
        return effect.held or Failure.of(temporary(f"Another runner uses {effect.digest}."))

    async def contents(self, effect: effects.ListCache) -> CacheContents:
        bounded = effect.room < inf
        if effect.clear and await self._in_folders(partial(self.cache.remove_slabs, effect.clear)) < effect.clear:
            await self.sources.clear_partial(all_of_them=True)
        interrupted = await self.sources.partial_bytes() if bounded else 0
        room = effect.room - interrupted
        wished = await self._in_folders(self.cache.wished) if effect.for_others else 0
        found = await self._in_folders(partial(self.cache.contents, effect.capacity, room - wished, effect.changed))
        return replace(found, partial=interrupted, wished=wished)

    async def wish(self, size: int) -> None:
        await self._in_folders(partial(self.cache.wish, size))

    async def wished(self) -> bool:
        return await self._in_folders(self.cache.wished) > 0

    async def look(self, held: Held, *, begins: Callable[[], None]) -> bool:
        def look() -> bool:
            begins()
            self.cache.touch(held)
            return held.lease.is_live()

        return await self.folders.run(look)

    async def vanished(self, held: Sequence[Held]) -> list[Held]:
        def look() -> list[Held]:
            self.cache.renew_leases()
            return _vanished(held)

        return await self.folders.run(look)

    def release(self, held: Held) -> None:
        # In the thread for folders: if a call hangs there, closing a folder may hang, too.
        self.folders.submit(held.lease.release)

    async def clear_partial(self) -> None:
        await self.sources.clear_partial()

    async def _in_folders(self, call: Callable[[], T]) -> T:
        return await self.folders.run(call, discard=_discard)


def _vanished(held: Sequence[Held]) -> list[Held]:
    gone, errors = [], []
    for one in held:
        try:
            if not one.lease.is_live():
                gone.append(one)
        except OSError as error:  # the others are looked at all the same
            errors.append(error)
    if errors:
        log.warning("adapter_folders_not_readable", folders=len(errors), reason=str(errors[0]))
    return gone


def failure_of(error: Exception) -> Failure:
    match error:
        case MotetError():
            return Failure.of(error)
        case CallHangs():
            return Failure.of(
                temporary(
                    f"This runner's disk cache does not answer: a call got nothing for {error.seconds:g} s. Motet "
                    "tries again automatically. Check the disk."
                )
            )
        case OSError():
            return Failure.of(
                temporary(
                    f"This runner's disk cache fails: {error.strerror or error} ({error.filename}). Motet tries again "
                    "automatically."
                )
            )
        case _:
            log.error("adapter_work_failed", exc_info=error)
            return Failure.of(Internal("The runner could not handle this adapter. See the runner's log."))


def _discard(answer: object) -> None:
    if isinstance(answer, Held):
        answer.lease.release()
