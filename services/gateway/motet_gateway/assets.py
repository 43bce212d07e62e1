"""Tokenizers and chat templates of base models, and chat templates of adapters, by digest. The gateway fetches each
from a runner of the group and keeps it on disk.

So the gateway needs no model folder, and after a restart it needs no runner either.
"""

import asyncio
import contextlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import structlog

from motet.adapter_template import MAX_ADAPTER_TEMPLATE_BYTES, digest_of_template
from motet.api.v1 import runner_pb2
from motet.digest import ASSET_FILES, asset_digest
from motet.errors import Internal, MotetError, SetupError
from motet.rpc import Backoff
from motet.transport import CallFailed, Network, StatusCode
from motet.transport.methods import ASSETS
from motet_gateway.asset_searches import Owner, Search, Searches
from motet_gateway.kept_assets import KeptAssets
from motet_gateway.tokens.own_template import OwnTemplate
from motet_gateway.tokens.text_model import ModelTokenizer

log = structlog.get_logger(__name__)

FETCH_SECONDS = 30.0
RETRY_SECONDS = 60.0
"""After this time files that could not be used are fetched again: a disk may have been full."""
UNWANTED_SECONDS = 600.0
"""For so long a digest that nothing has wanted is asked for, and a tokenizer is kept in memory."""
KEPT_SECONDS = 24 * 3600.0
"""For so long files that no gateway on this disk has used stay there. Each revision of an adapter may have its own."""
UNFINISHED = ".fetching-"
MAX_ASSET_BYTES = 256 * 1024 * 1024


TEMPLATE = "template.json"
TIDY_SECONDS = 60.0
MAX_UNTIDIED = 1 / 16
"""Of what the disk may have: when so much has come, it is tidied at once."""

Asset = TypeVar("Asset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """On what strangers can make more of. What leaves memory is read from the disk again, and what leaves the disk is
    fetched again."""

    kept_bytes: float = math.inf
    """In memory"""
    kept_bytes_of_namespace: float = math.inf
    disk_bytes: float = math.inf
    disk_entries: float = math.inf
    at_once: int = 64
    """How many runners are asked"""
    at_once_of_namespace: int = 64
    unwanted_seconds: float = math.inf
    """For so long what no request has wanted is asked for. Those that wait are made to say so."""


@dataclass(frozen=True, slots=True)
class AssetKind(Generic[Asset]):
    """What a store keeps: the files of a folder, and what is read from them."""

    files: Collection[str]
    needed: str
    """The file without which the others are of no use"""
    lacks: str
    """What is wrong without it"""
    max_bytes: int
    digest: Callable[[Path], str]
    read: Callable[[Path], Asset]
    """Called in a thread"""
    size: Callable[[Asset], int]
    bounds: "Bounds"


MODEL_ASSETS = AssetKind(
    ASSET_FILES,
    "tokenizer.json",
    "the model's folder has no tokenizer.json; save the tokenizer there with save_pretrained()",
    MAX_ASSET_BYTES,
    asset_digest,
    lambda folder: ModelTokenizer.from_folder(folder),  # noqa: PLW0108 - looked up at each call
    lambda _: 0,
    Bounds(),
)
TEMPLATES = AssetKind(
    (TEMPLATE,),
    TEMPLATE,
    "the runner has sent no chat template of the adapter",
    MAX_ADAPTER_TEMPLATE_BYTES,
    lambda folder: digest_of_template((folder / TEMPLATE).read_bytes()),
    lambda folder: OwnTemplate.from_file(folder / TEMPLATE),
    lambda template: template.bytes,
    Bounds(
        kept_bytes=64 << 20,
        kept_bytes_of_namespace=8 << 20,
        disk_bytes=256 << 20,
        disk_entries=4096,
        at_once=16,
        at_once_of_namespace=4,
        unwanted_seconds=60.0,
    ),
)


class AssetStore(Generic[Asset]):
    """`get` never waits. `fetch` begins at most one search for each owner of a digest, and calls `changed` when it has
    ended."""

    def __init__(
        self,
        folder: Path,
        changed: Callable[[], None],
        *,
        network: Network,
        kind: AssetKind[Asset],
        addresses: Callable[[str], Iterable[str]],
        missing: Callable[[Mapping[str, list[str]]], None] = lambda _: None,
        ask_again: Callable[[], None] | None = None,
    ) -> None:
        """`addresses`: of a group's runners. `missing` is told, by group, the digests of adapters whose assets no
        runner has, whenever they change. `ask_again` makes those that wait fetch once more; None: `changed` does."""
        self._network = network
        self._folder = folder
        self._changed = changed
        self._kind = kind
        self._addresses = addresses
        self._missing = missing
        self._kept = KeptAssets[Asset](
            most_bytes=kind.bounds.kept_bytes, most_of_namespace=kind.bounds.kept_bytes_of_namespace
        )
        self._ask_again = ask_again or changed
        self._searches = Searches()
        self._tasks: dict[Search, asyncio.Task[None]] = {}
        self._free = asyncio.Semaphore(kind.bounds.at_once)
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By namespace"""
        self._called = -math.inf
        """When those that wait were last made to say what they want"""
        self._tidied = -math.inf
        self._untidied = 0.0
        """The part of what the disk may have that has come since"""

    def get(self, digest: str) -> Asset | None:
        """What was read from the files of this digest, or None if it is to be fetched. Raises the error that made its
        files unusable."""
        now = asyncio.get_running_loop().time()
        if (failure := self._kept.failure(digest, now)) is not None:
            raise failure.again()
        if (found := self._kept.find(digest)) is not None:
            self._kept.want(digest, now)
        return found

    def fetch(self, digest: str, owner: Owner, *, at_hand: bool = False) -> None:
        """Load it from disk or from the first runner of this owner's group that sends it. `at_hand`: one of them has
        the adapter in memory."""
        now = asyncio.get_running_loop().time()
        self._kept.want(digest, now)
        if digest and not self._kept.is_decided(digest, now):
            search = self._searches.want(digest, owner, now, at_hand=at_hand)
            if search is not None:
                self._tasks[search] = asyncio.create_task(self._search(search), name=f"assets {digest[:19]}")

    def is_sought(self, digest: str, owner: Owner) -> bool:
        """Whether nothing has changed for those that wait for it"""
        return self._searches.has(digest, owner)

    def forget_unwanted(self) -> None:
        """What is wanted again later is read from the disk."""
        before = asyncio.get_running_loop().time() - UNWANTED_SECONDS
        self._kept.forget_unwanted(before, {search.digest for search in self._tasks})

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _search(self, search: Search) -> None:
        digest = search.digest
        try:
            await self._load(search, self._folder / _name_of(digest))
        except MotetError as error:
            self._failed(digest, error)
            log.error("assets_invalid", digest=digest, reason=error.message)
        except Exception as error:  # without an answer, requests would wait until their deadlines
            self._failed(digest, Internal(f"the model's files cannot be used: {type(error).__name__}: {error}"))
            log.exception("assets_invalid", digest=digest)
        finally:
            self._end(search)
        if self._kept.is_decided(digest, asyncio.get_running_loop().time()):
            for other in self._searches.of(digest):
                self._tasks[other].cancel()
                self._end(other)
        self._missing(self._searches.missing())
        self._changed()

    def _end(self, search: Search) -> None:
        if self._tasks.pop(search, None) is not None:
            self._searches.end(search)

    async def _load(self, search: Search, folder: Path) -> None:
        digest = search.digest
        while True:
            is_whole = await asyncio.to_thread(_is_whole, folder, digest, self._kind.digest)
            if not is_whole and not await self._fetch_from_any(search, folder):
                return
            with contextlib.suppress(FileNotFoundError):  # another gateway has tidied the disk since
                asset = await asyncio.to_thread(self._kind.read, folder)
                self._kept.keep(digest, asset, search.owner.namespace, self._kind.size(asset))
                break
        log.info("assets_ready", digest=digest)

    def _failed(self, digest: str, error: MotetError) -> None:
        self._kept.failed(digest, error, until=asyncio.get_running_loop().time() + RETRY_SECONDS)

    def _is_unwanted(self, search: Search) -> bool:
        """Now and then, those that wait look again for what they wait for."""
        now, patience = asyncio.get_running_loop().time(), self._kind.bounds.unwanted_seconds
        if now - self._called > patience / 4:
            self._called = now
            self._searches.take_turns()
            self._missing(self._searches.missing())
            self._ask_again()
        return now - search.wanted_at > min(patience, UNWANTED_SECONDS)

    async def _fetch_from_any(self, search: Search, folder: Path) -> bool:
        """False: it is not wanted any more."""
        owner, backoff = search.owner, Backoff(self._network.spread)
        asked = runner_pb2.AssetsRequest(digest=search.digest, adapter=owner.adapter)
        turns = self._turns.setdefault(owner.namespace, asyncio.Semaphore(self._kind.bounds.at_once_of_namespace))
        while not self._is_unwanted(search):
            search.news.clear()
            addresses = list(self._addresses(owner.group))
            for address in addresses:
                try:
                    async with turns, self._free:
                        await self._fetch(asked, address, folder)
                except (CallFailed, OSError, TimeoutError, ValueError, SetupError) as error:
                    absent = owner.adapter and isinstance(error, CallFailed) and error.code is StatusCode.NOT_FOUND
                    say = log.debug if absent else log.warning  # of many runners, few have checked an adapter
                    say("assets_fetch_failed", digest=search.digest, address=address, reason=str(error)[:200])
                else:
                    return True
                finally:  # also when it has failed: the disk may be full
                    await self._tidy_now_and_then()
            if not search.missing:
                search.missing = True
                self._missing(self._searches.missing())
            await self._rest(search, backoff.next(), len(addresses))
        return False

    async def _rest(self, search: Search, least: float, runners: int) -> None:
        """Before its runners are asked again. It may be long where much is missing, and ends early if there is news or
        if nobody wants it any more."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while (rest := began + max(least, self._searches.pause(search, runners)) - clock()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(rest, self._kind.bounds.unwanted_seconds)):
                    await search.news.wait()
                    return
            if self._is_unwanted(search):
                return

    async def _tidy_now_and_then(self) -> None:
        """Each time where few are kept. Where strangers decide how many, not for each of them."""
        now, is_bounded = asyncio.get_running_loop().time(), self._kind.bounds.disk_entries < math.inf
        if is_bounded and now - self._tidied < TIDY_SECONDS and self._untidied < MAX_UNTIDIED:
            return
        self._tidied, self._untidied = now, 0.0
        used, fetched = {_name_of(one) for one in self._kept.wanted}, {_name_of(one.digest) for one in self._tasks}
        await asyncio.to_thread(_tidy, self._folder, used, fetched, self._kind.bounds)

    async def _fetch(self, asked: runner_pb2.AssetsRequest, address: str, folder: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=self._folder))
        try:
            async with asyncio.timeout(FETCH_SECONDS), self._network.channel(address, "runner") as channel:
                chunks = channel.download(ASSETS, asked)
                async with contextlib.aclosing(chunks):
                    received_bytes = await _write_files(chunks, unfinished, self._kind)
            if (received := await asyncio.to_thread(self._kind.digest, unfinished)) != asked.digest:
                raise ValueError(f"its files have the digest {received}: they have changed since it started")
            try:
                unfinished.replace(folder)
            except OSError:  # another process may have put the same files there meanwhile, or damaged ones stay
                if not await asyncio.to_thread(_is_whole, folder, asked.digest, self._kind.digest):
                    raise
            bounds = self._kind.bounds
            self._untidied += max(received_bytes / bounds.disk_bytes, 1 / bounds.disk_entries)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _is_whole(folder: Path, digest: str, digest_of: Callable[[Path], str]) -> bool:
    """Whether it has the files of this digest. If not, it is removed: a power failure may have cut its files."""
    with contextlib.suppress(OSError):
        os.utime(folder)  # first: another gateway may be about to remove what nobody has used
    if not folder.exists():  # else what another search puts there now would be taken for damaged
        return False
    with contextlib.suppress(OSError):
        if digest_of(folder) == digest:
            return True
    log.warning("assets_damaged", folder=str(folder), hint="They are fetched again from a runner.")
    shutil.rmtree(folder, ignore_errors=True)
    return False


def _name_of(digest: str) -> str:
    return digest.rpartition(":")[2]


def _tidy(folder: Path, used: Collection[str], fetched: Collection[str], bounds: Bounds) -> None:
    """Remove what a gateway that was killed has left of a fetch, files that nobody has used for long, and what is
    beyond the bounds, but not what is `fetched` now. Other processes may be fetching into other folders now."""
    _tidy_unused(folder, used)
    if bounds.disk_entries == math.inf:
        return
    kept: list[tuple[float, int, Path]] = []
    with contextlib.suppress(OSError):
        for one in folder.iterdir():
            with contextlib.suppress(OSError):
                if not one.name.startswith(UNFINISHED) and one.name not in fetched:
                    kept.append((one.stat().st_mtime, sum(file.stat().st_size for file in one.iterdir()), one))
    total, entries = sum(size for _, size, _ in kept), len(kept)
    for _, size, one in sorted(kept):  # those first that were used longest ago
        if total <= bounds.disk_bytes and entries <= bounds.disk_entries:
            break
        with contextlib.suppress(OSError):
            shutil.rmtree(one.rename(folder / f"{UNFINISHED}{one.name}"))
        total, entries = total - size, entries - 1


def _tidy_unused(folder: Path, used: Collection[str]) -> None:
    with contextlib.suppress(OSError):
        for one in list(folder.iterdir()):
            with contextlib.suppress(OSError):
                unfinished = one.name.startswith(UNFINISHED)
                if one.name in used:
                    os.utime(one)
                elif time.time() - one.stat().st_mtime > (2 * FETCH_SECONDS if unfinished else KEPT_SECONDS):
                    # Nobody finds half of it.
                    shutil.rmtree(one if unfinished else one.rename(folder / f"{UNFINISHED}{one.name}"))


async def _write_files(chunks: AsyncIterator[runner_pb2.AssetChunk], folder: Path, kind: AssetKind[Asset]) -> int:
    """→ The bytes that have come"""
    received = 0
    async for chunk in chunks:
        received += len(chunk.data)
        if received > kind.max_bytes:
            raise ValueError(f"assets larger than {kind.max_bytes} bytes")
        # The runner sends the name. Only known names are written, so that no file lands outside the folder.
        if chunk.name in kind.files:
            with (folder / chunk.name).open("ab") as file:
                file.write(chunk.data)
    if not (folder / kind.needed).exists():
        # The digest covers the list of files, so no other runner has this one either. Asking again is of no use.
        raise Internal(kind.lacks)
    return received
