"""Copies an adapter from a folder into the disk cache. The folder's owner may write to it meanwhile."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from motet.digest import CHUNK_BYTES, ContentDigest, adapter_files
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.policy.values import FetchRequest, Held
from motet_runner.sources.fetch_errors import temporary
from motet_runner.sources.folder import AdapterFolder, FileStat, Signature

MAX_ATTEMPTS = 3
"""The most reads of a folder: if its files change during a read, the folder is read again."""


Reading = Callable[[], AbstractContextManager[None]]
"""A context around each read of the source. The source may hang while the runner's own disk works."""


class _SourceChanged(Exception):
    pass


def copy_folder(
    cache: DiskCache,
    source: AdapterFolder,
    request: FetchRequest,
    before: Held | None = None,
    reading: Reading = nullcontext,
    *,
    most: int | None = None,
) -> Held:
    """Raises AdapterFetchFailed, which says what is wrong and where. The copy has the checked sizes, and equals the
    folder's contents at one moment during the call. `most`: the bytes that there is room for."""
    limit = cache.bound(request.max_bytes)
    for _ in range(MAX_ATTEMPTS):
        with reading():
            stamp = source.stat_files(limit)
        if before is not None and before.stamp == stamp and (held := cache.find(before.digest, request)) is not None:
            return replace(held, stamp=stamp)
        size = sum(file.size for file in stamp)
        if most is not None and size > most:
            break  # it has grown since
        fill = partial(_copy_files, source=source, stamp=stamp, limit=limit, reading=reading)
        try:
            held = cache.store(fill, request, str(source.path), size)
        except _SourceChanged:
            continue
        return replace(held, stamp=stamp)
    raise temporary(f"{source.path} changes while Motet reads it. Motet tries again automatically.")


def _copy_files(
    target: Path,
    content: ContentDigest,
    *,
    source: AdapterFolder,
    stamp: Signature,
    limit: int,
    reading: Reading,
) -> None:
    for expected in sorted(stamp, key=lambda file: file.name):
        copy_file(source, expected, target / expected.name, content, reading)
    with reading():
        if source.stat_files(limit) != stamp:
            raise _SourceChanged


def copy_file(
    source: AdapterFolder, expected: FileStat, target: Path, content: ContentDigest, reading: Reading
) -> None:
    try:
        with reading():
            opened = os.fdopen(source.open(expected.name), "rb", buffering=0)
    except FileNotFoundError:
        raise _SourceChanged from None
    with opened as file, target.open("xb") as copy:
        with reading():
            if FileStat.of(expected.name, file.fileno()) != expected:
                raise _SourceChanged
        content.begin(expected.name, expected.size)
        left = expected.size  # the file may grow: copy no more than was checked
        chunk = memoryview(bytearray(min(CHUNK_BYTES, left)))  # one for all reads: new memory takes as long as a copy
        while left:
            with reading():
                count = file.readinto(chunk[:left])
            if not count:
                raise _SourceChanged
            content.update(chunk[:count])
            copy.write(chunk[:count])
            left -= count
        copy.flush()
        os.fchmod(copy.fileno(), 0o644)
        os.fsync(copy.fileno())


def store_fetched(cache: DiskCache, fetched: Path, request: FetchRequest) -> Held:
    """Move the files that a fetch process has fetched into the cache."""
    size = sum((fetched / file).stat().st_size for file in adapter_files(fetched))
    return cache.store(partial(_move_files, fetched), request, request.source, size)


def _move_files(fetched: Path, target: Path, content: ContentDigest) -> None:
    for name in adapter_files(fetched):
        (fetched / name).rename(target / name)
        with (target / name).open("rb") as file:
            content.begin(name, os.fstat(file.fileno()).st_size)
            while chunk := file.read(CHUNK_BYTES):
                content.update(chunk)
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
