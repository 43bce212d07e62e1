"""`python -m motet_runner.sources.fetch_process`: one fetch. It reads an order, writes lines of JSON, and ends.

Only this process has the Secret, and only during the fetch. The process leaves no core file, other processes of its
user can't read its memory, and it ends with the service.
"""

import ctypes
import errno
import os
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from motet.imports import without_collections

with without_collections(__name__):
    import orjson

    from motet.errors import AdapterFetchFailed
    from motet.sources import READABLE, SOURCES
    from motet_runner.sources.fetch_errors import malformed, no_space, temporary, too_large
    from motet_runner.sources.fetch_order import FetchOrder
    from motet_runner.sources.file_selection import (
        INDEX,
        MAX_ASSET_BYTES,
        check_listing,
        missing_file,
        of_adapter,
        of_model,
        shards,
    )
    from motet_runner.sources.folder import FolderUri
    from motet_runner.sources.network_guard import NetworkGuard
    from motet_runner.sources.remote_source import NeedRoom, Opening, OpenSource, RemoteSource
    from motet_runner.sources.secret import NO_CREDENTIALS, SourceCredentials, read_credentials
    from motet_runner.sources.uri import parse

MIN_BYTES_PER_SECOND = 1024
"""A source that gives fewer bytes per second during `stall_seconds` counts as stalled."""

MAX_WORKING_BYTES = 1 << 20
"""The most bytes of entity tags and of the files that the hub's library keeps for itself."""

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4


_speaking = threading.Lock()
"""Held by who writes a line, and for good by who writes the last one"""


def send(**words: Any) -> None:
    with _speaking:
        _write(words)


def end(status: int, words: dict[str, Any]) -> NoReturn:
    """Waits for no download that goes on. No thread says anything after this."""
    _speaking.acquire()
    _write(words)
    os._exit(status)


def _write(words: dict[str, Any]) -> None:
    # One write, so that the lines of two threads never mix.
    os.write(1, orjson.dumps(words) + b"\n")


def exit_with_parent(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if parent and os.getppid() != parent:
        sys.exit(1)  # the service ended before the call of prctl


def parsed(order: FetchOrder) -> RemoteSource:
    source = parse(order.uri, order.revision)
    if isinstance(source, FolderUri):
        known = " and ".join(one.prefix for one in READABLE if one.network)
        raise malformed(f"{order.uri} is a folder of this machine. Motet fetches only {known} sources.")
    return source


def fetch(order: FetchOrder, source: RemoteSource, secret: SourceCredentials) -> None:
    into = Path(order.into)
    into.mkdir(parents=True, exist_ok=True)
    allowed = [*order.access.allowed_hosts, *source.hosts(order.access, secret)]
    NetworkGuard([*allowed, *_hosts(order.access.proxy)]).install()
    from motet_runner.sources.web_requests import client

    browser = client(order.access, NetworkGuard(allowed), timeout=order.stall_seconds)
    watch = TransferWatch(order)
    watch.start()
    need: NeedRoom = RoomOnDisk(watch).need if order.asks_room else lambda *_: 0
    opened = source.open(Opening(order=order, secret=secret, client=browser, on_checked=watch.check, need=need))
    if opened.revision:
        send(revision=opened.revision)
    fetch_all(order, opened, into, opened.sizes, need)
    opened.confirm(into)


def fetch_all(
    order: FetchOrder, source: OpenSource, into: Path, sizes: Mapping[str, int | None] | None, need: NeedRoom
) -> None:
    first = of_adapter(order.max_bytes) if order.what == "adapter" else of_model()
    if sizes is not None:
        check_listing(sizes, first, order.max_bytes, order.uri)
        listed = [file for file in first if file.name in sizes]
        need({file.name: file.limit if (size := sizes[file.name]) is None else size for file in listed})
    for file in first:
        if not source.fetch(file, into):
            (into / file.name).unlink(missing_ok=True)  # an earlier fetch may have left it, when the source had it
    if order.what == "adapter":
        return
    index = into / INDEX
    weights = shards(index.read_bytes() if index.exists() else None, order.max_bytes)
    if sizes is not None:
        check_listing(sizes, weights, order.max_bytes, order.uri)
        send(total=sum(sizes[file.name] or 0 for file in weights))
    pool = ThreadPoolExecutor(order.parallel)
    try:
        for coming in [pool.submit(source.fetch, file, into) for file in weights]:
            if not coming.result():
                raise missing_file(order.uri, "*.safetensors", sizes or ())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after the first failure nothing else need come
    for stale in {path.name for path in into.glob("*.safetensors")} - {file.name for file in weights}:
        (into / stale).unlink()


class RoomOnDisk:
    """Asks the service for room before a file is written. Files of an adapter come one after the other."""

    def __init__(self, watch: "TransferWatch") -> None:
        self._watch = watch
        self._files: dict[str, int] = {}
        self._granted = 0

    def need(self, files: Mapping[str, int], less: Sequence[int] = ()) -> int:
        """See `NeedRoom`. If there is no room, the service ends this process. If it has to wait for long and another
        fetch wants its place, the service begins another one later."""
        self._files |= files
        total = sum(self._files.values())
        if total <= self._granted:
            return 0
        self._watch.paused = True
        send(needs=[total, *(total - one for one in less)])
        if not (answer := sys.stdin.buffer.readline()):
            os._exit(1)  # the service has gone
        self._granted = int(answer)
        self._watch.paused = False
        missing = max(0, total - self._granted)
        if missing:
            (name,) = files
            self._files[name] -= missing
        return missing


class TransferWatch(threading.Thread):
    """Reports how many bytes have arrived. Ends a fetch that is too slow, or that has more bytes than allowed."""

    def __init__(self, order: FetchOrder) -> None:
        super().__init__(name="watch", daemon=True)
        self._folder = Path(order.into)
        of_all = sum(file.limit for file in of_adapter(order.max_bytes))
        self._limit = MAX_WORKING_BYTES + (of_all if order.what == "adapter" else order.max_bytes + MAX_ASSET_BYTES)
        self._stall_seconds = order.stall_seconds
        self._uri = order.uri
        self.checked = 0
        """Bytes that were read again to verify their digest. They count as progress, although no file grows."""

        self.paused = False
        """While there is no room on the disk: the source is not to blame."""

    def check(self, count: int) -> None:
        self.checked += count

    def size(self) -> int:
        """The bytes that are in the folder now."""
        return _size_of(self._folder)

    def run(self) -> None:
        poll_seconds = min(1.0, self._stall_seconds / 10)
        seen: deque[tuple[float, int]] = deque()
        while True:
            if self.paused:
                seen.clear()
                time.sleep(poll_seconds)
                continue
            now, size = time.monotonic(), self.size()
            if size > self._limit:
                self._end(too_large(f"{self._uri} has more than {self._limit} bytes, which is the limit."))
            done = size + self.checked
            if seen and done < seen[-1][1]:
                seen.clear()  # a part was not continued, and comes again
            if not seen or done != seen[-1][1]:
                send(bytes=size)
            seen.append((now, done))
            while len(seen) > 1 and seen[1][0] <= now - self._stall_seconds:
                seen.popleft()
            since, before = seen[0]
            if now - since >= self._stall_seconds and done - before < MIN_BYTES_PER_SECOND * (now - since):
                self._end(
                    temporary(
                        f"{self._uri} gave {done - before} bytes in {now - since:.0f} s, which is too slow. Motet "
                        "tries again automatically."
                    )
                )
            time.sleep(poll_seconds)

    def _end(self, failure: AdapterFetchFailed) -> None:
        end(1, failed(failure, NO_CREDENTIALS))


def _size_of(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size  # noqa: PTH116, PTH118 - called often
            except FileNotFoundError:
                continue
    return total


def _hosts(url: str) -> list[str]:
    host = urlsplit(url).hostname
    return [host] if host else []


def failed(failure: AdapterFetchFailed, secret: SourceCredentials) -> dict[str, Any]:
    return {
        "failure": secret.scrub(failure.message)[:1024],
        "reason": failure.reason,
        "retry_after": failure.retry_after,
    }


def _failure_of(error: Exception, order: FetchOrder) -> AdapterFetchFailed:
    match error:
        case AdapterFetchFailed():
            return error
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return no_space(
                f"There is no space left in {order.into} for {order.uri}. Free some space. Motet tries again "
                "automatically."
            )
        case OSError(strerror=str(why)) if why:
            return temporary(f"Motet cannot fetch {order.uri}: {why}.")
        case _:  # the error's text may contain anything, also a password
            return temporary(f"Motet cannot fetch {order.uri}: {type(error).__name__}.")


def main() -> None:
    order = FetchOrder.decode(sys.stdin.buffer.readline())
    exit_with_parent(order.parent)
    secret = NO_CREDENTIALS
    try:
        source = parsed(order)
        known = SOURCES[urlsplit(order.uri).scheme]
        secret = read_credentials(
            order.credentials,
            order.access,
            known.secrets,
            known.secret_options,
            timeout=order.stall_seconds,
            uri=order.uri,
        )
        fetch(order, source, secret)
    except Exception as error:
        end(0, failed(_failure_of(error, order), secret))
    end(0, {"bytes": _size_of(Path(order.into)), "done": True})


if __name__ == "__main__":
    main()
