"""`python -m motet_runner.sources.fetch_process`: one fetch. It reads an order, writes lines of JSON, and ends.

Only this process has the Secret, and only during the fetch. It leaves no core file, other processes of its user can't
read its memory, and it dies with the service.
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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import orjson

from motet.errors import AdapterFetchFailed, MotetError
from motet_runner.sources.fetch_errors import malformed, no_space, temporary, too_large
from motet_runner.sources.fetch_order import FetchOrder
from motet_runner.sources.file_selection import (
    INDEX,
    MAX_ASSET_BYTES,
    WantedFile,
    check_listing,
    max_adapter_total,
    missing_file,
    of_adapter,
    of_model,
    shards,
)
from motet_runner.sources.network_guard import NetworkGuard
from motet_runner.sources.secret import NO_CREDENTIALS, SourceCredentials, read_credentials
from motet_runner.sources.uri import HubUri, WebUri, parse

MIN_BYTES_PER_SECOND = 1024
"""A source that gives fewer bytes per second during `stall_seconds` counts as stalled."""

MAX_WORKING_BYTES = 1 << 20
"""The most bytes of entity tags and of the files that the hub's library keeps for itself."""

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4


class FileSource(Protocol):
    def fetch(self, file: WantedFile, into: Path) -> bool: ...


def send(**words: Any) -> None:
    # One write, so that the lines of two threads never mix.
    os.write(1, orjson.dumps(words) + b"\n")


def exit_with_parent(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if parent and os.getppid() != parent:
        sys.exit(1)  # the service died before that call


def fetch(order: FetchOrder, secret: SourceCredentials) -> None:
    into = Path(order.into)
    into.mkdir(parents=True, exist_ok=True)
    source = parse(order.uri, order.revision)
    allowed = _allowed(order)
    NetworkGuard([*allowed, *_hosts(order.access.proxy)]).install()
    from motet_runner.sources.web import WebFolder, client

    browser = client(order.access, NetworkGuard(allowed), timeout=order.stall_seconds)
    if isinstance(source, WebUri):
        TransferWatch(order).start()
        _fetch_all(order, WebFolder(source.url, browser, secret.header, pause=order.stall_seconds / 60), into, None)
    elif isinstance(source, HubUri):
        # The library reads these when it is imported: it may use only our client, and only the order's folder.
        os.environ |= {
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": str(max(1, round(order.stall_seconds))),
            "HF_HOME": str(into / ".cache"),
        }
        from motet_runner.sources.hub import HubRepository

        watch = TransferWatch(order)
        watch.start()
        repository = HubRepository(
            source, order.access.hub_endpoint, secret, browser, timeout=order.stall_seconds, on_checked=watch.check
        )
        send(revision=repository.commit)
        _fetch_all(order, repository, into, repository.sizes)
    else:
        raise malformed(f"{order.uri} is a folder of this machine. Motet fetches only hf:// and https:// sources.")


def _fetch_all(order: FetchOrder, source: FileSource, into: Path, sizes: dict[str, int | None] | None) -> None:
    name = order.uri
    if order.what == "adapter":
        wanted = of_adapter(order.max_bytes)
        if sizes is not None:
            check_listing(sizes, wanted, order.max_bytes, name)
        _fetch_existing(source, wanted, into)
        return
    first = of_model()
    if sizes is not None:
        check_listing(sizes, first, order.max_bytes, name)
    _fetch_existing(source, first, into)
    index = into / INDEX
    weights = shards(index.read_bytes() if index.exists() else None, order.max_bytes)
    if sizes is not None:
        check_listing(sizes, weights, order.max_bytes, name)
        send(total=sum(sizes[file.name] or 0 for file in weights))
    with ThreadPoolExecutor(order.parallel) as pool:
        for coming in [pool.submit(source.fetch, file, into) for file in weights]:
            if not coming.result():
                raise missing_file(name, "*.safetensors", sizes or ())
    for stale in {path.name for path in into.glob("*.safetensors")} - {file.name for file in weights}:
        (into / stale).unlink()


def _fetch_existing(source: FileSource, wanted: Iterable[WantedFile], into: Path) -> None:
    for file in wanted:
        if not source.fetch(file, into):
            (into / file.name).unlink(missing_ok=True)  # an earlier fetch brought it, from another state of the source


class TransferWatch(threading.Thread):
    """Reports how many bytes have arrived. Ends a fetch that is too slow, or that has more bytes than allowed."""

    def __init__(self, order: FetchOrder) -> None:
        super().__init__(name="watch", daemon=True)
        self._folder = Path(order.into)
        limit = order.max_bytes + MAX_ASSET_BYTES if order.what == "model" else max_adapter_total(order.max_bytes)
        self._limit = limit + MAX_WORKING_BYTES
        self._stall_seconds = order.stall_seconds
        self._uri = order.uri
        self.checked = 0
        """Bytes that were read again to compare their digest. That is progress, too, although no file grows."""

    def check(self, count: int) -> None:
        self.checked += count

    def run(self) -> None:
        poll_seconds = min(1.0, self._stall_seconds / 10)
        seen: deque[tuple[float, int]] = deque()
        while True:
            now, size = time.monotonic(), _size_of(self._folder)
            if size > self._limit:
                self._end(too_large(f"{self._uri} has more than {self._limit} bytes, which is the limit."))
            done = size + self.checked
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
        send_failure(failure, NO_CREDENTIALS)
        os._exit(1)


def _size_of(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size  # noqa: PTH116, PTH118 - called often
            except FileNotFoundError:
                continue
    return total


def _allowed(order: FetchOrder) -> list[str]:
    """The hosts that the platform allows, and the hub that the platform has named."""
    return [*order.access.allowed_hosts, *(_hosts(order.access.hub_endpoint) if order.uri.startswith("hf://") else ())]


def _hosts(url: str) -> list[str]:
    host = urlsplit(url).hostname
    return [host] if host else []


def send_failure(failure: MotetError, secret: SourceCredentials) -> None:
    send(
        failure=secret.scrub(failure.message)[:1024],
        reason=failure.reason,
        retry_after=failure.retry_after,
    )


def main() -> None:
    order = FetchOrder.decode(sys.stdin.buffer.readline())
    exit_with_parent(order.parent)
    secret = NO_CREDENTIALS
    try:
        secret = read_credentials(order.credentials, order.access, timeout=order.stall_seconds)
        fetch(order, secret)
    except AdapterFetchFailed as failure:
        send_failure(failure, secret)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            send_failure(
                no_space(
                    f"There is no space left in {order.into} for {order.uri}. Free some space. Motet tries again "
                    "automatically."
                ),
                secret,
            )
        else:
            send_failure(
                temporary(f"Motet cannot fetch {order.uri}: {error.strerror or type(error).__name__}."), secret
            )
    except Exception as error:
        # The text of an unknown error may contain anything, also a password.
        send_failure(temporary(f"Motet cannot fetch {order.uri}: {type(error).__name__}."), secret)
    else:
        send(bytes=_size_of(Path(order.into)), done=True)
    sys.stdout.flush()
    os._exit(0)  # do not wait for other downloads after one has failed


if __name__ == "__main__":
    main()
