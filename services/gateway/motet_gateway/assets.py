"""Tokenizers and chat templates by digest. The gateway fetches each from any runner of the group and keeps it on disk.

So the gateway needs no model folder, and after a restart it needs no runner either.
"""

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import structlog

from motet.api.v1 import runner_pb2
from motet.digest import ASSET_FILES, asset_digest
from motet.errors import Internal, MotetError, SetupError
from motet.rpc import Backoff
from motet.transport import CallFailed, Network
from motet.transport.methods import ASSETS
from motet_gateway.tokens.text_model import ModelTokenizer

log = structlog.get_logger(__name__)

FETCH_SECONDS = 30.0
RETRY_SECONDS = 60.0
"""After this time files that could not be used are fetched again: a disk may have been full."""
UNFINISHED = ".fetching-"
MAX_ASSET_BYTES = 256 * 1024 * 1024


class AssetStore:
    """`get` never waits. `fetch` starts at most one fetch per digest and calls `changed` when it has ended."""

    def __init__(self, folder: Path, changed: Callable[[], None], *, network: Network) -> None:
        self._network = network
        self._folder = folder
        self._changed = changed
        self._models: dict[str, ModelTokenizer] = {}
        self._failures: dict[str, tuple[float, MotetError]] = {}
        """With the time from which on a fetch may try again."""
        self._fetching: dict[str, asyncio.Task[None]] = {}

    def get(self, digest: str) -> ModelTokenizer | None:
        """The model's tokenizer, or None if it is to be fetched. Raises the error that made its files unusable."""
        if (failure := self._failure(digest)) is not None:
            raise failure.again()
        return self._models.get(digest)

    def fetch(self, digest: str, addresses: Callable[[], Iterable[str]]) -> None:
        """Load it from disk or from the first runner that sends it. Each attempt asks `addresses` again."""
        if digest and digest not in self._models and digest not in self._fetching and self._failure(digest) is None:
            task = asyncio.create_task(self._load(digest, addresses), name=f"assets {digest[:19]}")
            self._fetching[digest] = task
            task.add_done_callback(lambda _: self._fetching.pop(digest, None))

    async def close(self) -> None:
        tasks = list(self._fetching.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, digest: str, addresses: Callable[[], Iterable[str]]) -> None:
        folder = self._folder / digest.rpartition(":")[2]
        try:
            if not await asyncio.to_thread(_is_whole, folder, digest):
                await asyncio.to_thread(_remove_unfinished, self._folder)
                await self._fetch_from_any(digest, addresses, folder)
            self._models[digest] = await asyncio.to_thread(ModelTokenizer.from_folder, folder)
            self._failures.pop(digest, None)
            log.info("assets_ready", digest=digest)
        except MotetError as error:
            self._failed(digest, error)
            log.error("assets_invalid", digest=digest, reason=error.message)
        except Exception as error:  # without an answer, requests would wait until their deadlines
            self._failed(digest, Internal(f"the model's files cannot be used: {type(error).__name__}: {error}"))
            log.exception("assets_invalid", digest=digest)
        finally:
            self._changed()

    def _failure(self, digest: str) -> MotetError | None:
        until, failure = self._failures.get(digest, (0.0, None))
        return failure if asyncio.get_running_loop().time() < until else None

    def _failed(self, digest: str, error: MotetError) -> None:
        self._failures[digest] = asyncio.get_running_loop().time() + RETRY_SECONDS, error

    async def _fetch_from_any(self, digest: str, addresses: Callable[[], Iterable[str]], folder: Path) -> None:
        backoff = Backoff(self._network.spread)
        while True:
            for address in list(addresses()):
                try:
                    await self._fetch(digest, address, folder)
                except (CallFailed, OSError, TimeoutError, ValueError, SetupError) as error:
                    log.warning("assets_fetch_failed", digest=digest, address=address, reason=str(error)[:200])
                else:
                    return
            await asyncio.sleep(backoff.next())

    async def _fetch(self, digest: str, address: str, folder: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=self._folder))
        try:
            async with asyncio.timeout(FETCH_SECONDS), self._network.channel(address, "runner") as channel:
                chunks = channel.download(ASSETS, runner_pb2.AssetsRequest(digest=digest))
                async with contextlib.aclosing(chunks):
                    await _write_files(chunks, unfinished)
            if (received := await asyncio.to_thread(asset_digest, unfinished)) != digest:
                raise ValueError(f"its files have the digest {received}: they have changed since it started")
            # Another process may have put the same files there meanwhile.
            with contextlib.suppress(OSError):
                unfinished.replace(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _is_whole(folder: Path, digest: str) -> bool:
    """Whether it has the files of this digest. If not, it is removed: a power failure may have cut its files."""
    with contextlib.suppress(OSError):
        if asset_digest(folder) == digest:
            return True
    if folder.exists():
        log.warning("assets_damaged", folder=str(folder), hint="They are fetched again from a runner.")
        shutil.rmtree(folder, ignore_errors=True)
    return False


def _remove_unfinished(folder: Path) -> None:
    """What a gateway that was killed has left. Other processes may be fetching into other folders now."""
    for unfinished in folder.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):
            if time.time() - unfinished.stat().st_mtime > 2 * FETCH_SECONDS:
                shutil.rmtree(unfinished, ignore_errors=True)


async def _write_files(chunks: AsyncIterator[runner_pb2.AssetChunk], folder: Path) -> None:
    received = 0
    async for chunk in chunks:
        received += len(chunk.data)
        if received > MAX_ASSET_BYTES:
            raise ValueError(f"assets larger than {MAX_ASSET_BYTES} bytes")
        # The runner sends the name. Only known names are written, so that no file lands outside the folder.
        if chunk.name in ASSET_FILES:
            with (folder / chunk.name).open("ab") as file:
                file.write(chunk.data)
    if not (folder / "tokenizer.json").exists():
        # The digest covers the list of files, so no other runner has this one either. Asking again is of no use.
        raise Internal("the model's folder has no tokenizer.json; save the tokenizer there with save_pretrained()")
