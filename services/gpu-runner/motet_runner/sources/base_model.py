"""Finds the base model's folder before the engine starts. A model from a remote source is fetched first."""

import asyncio
import os
import random
import time
from contextlib import suppress
from pathlib import Path

import orjson
import structlog

from motet.disk import sync_folder
from motet.errors import AdapterFetchFailed, ModelFolderError, SetupError
from motet.sources import EXAMPLES
from motet_runner.settings import Settings
from motet_runner.sources.fetch_errors import RETRY_LATER_SECONDS
from motet_runner.sources.folder import FolderUri, snapshot_in
from motet_runner.sources.partial_fetch import key_of, locked_across_machines
from motet_runner.sources.source_access import RemoteFiles, Sources, may_continue
from motet_runner.sources.uri import parse
from motet_runner.supported_models import read_supported_config

log = structlog.get_logger(__name__)

COMPLETE = ".complete.json"
"""The marker file in the folder of a completely fetched model"""

MAX_ATTEMPTS = 5
"""How many fetches in a row may fail without a new byte. Then the runner ends; when it starts again, it continues the
fetch."""

LOG_SECONDS = 10.0


async def model_folder(settings: Settings, sources: Sources, root: Path) -> Path:
    """The base model's folder. Raises an error that says what is wrong with the source; the error ends the runner."""
    if not settings.model_uri:
        raise SetupError(f"MOTET_RUNNER_MODEL_URI is not set. Set it to the base model: {EXAMPLES}.")
    try:
        source = parse(settings.model_uri, settings.model_revision)
        if isinstance(source, FolderUri):
            inside = snapshot_in(source.path, settings.model_revision)
            return _checked(settings, settings.model_folder() if inside is None else settings.check_model(inside))
        store = sources.store_of(settings.model_uri, settings.model_credentials)
        folder = root / key_of(settings.model_uri, settings.model_revision, *store)
        async with locked_across_machines(folder):
            if not await asyncio.to_thread(_is_complete, folder):
                await _fetch(settings, sources, folder)
        return _checked(settings, settings.check_model(folder))
    except AdapterFetchFailed as failure:
        message = failure.message.replace("source.image", "source.uri")
        for field in ("uri", "credentialsSecretRef", "revision"):
            message = message.replace(f"source.{field}", f"model.{field}")
        raise ModelFolderError(
            f"The runner cannot get the model of pool {settings.pool}. {message}", reason=failure.reason
        ) from None


def _checked(settings: Settings, folder: Path) -> Path:
    read_supported_config(folder, with_vllm=settings.backend == "vllm")
    return folder


async def _fetch(settings: Settings, sources: Sources, folder: Path) -> None:
    remote = RemoteFiles(
        uri=settings.model_uri,
        revision=settings.model_revision,
        credentials=settings.model_credentials,
        max_bytes=settings.max_model_gib << 30,
    )
    progress = _FetchLog(sources, LOG_SECONDS * sources.time_scale)
    log.info("model_fetch_started", source=settings.model_uri, revision=settings.model_revision or "main")
    failures = 0
    while True:
        before = progress.fetched_bytes
        try:
            await sources.fetch_into("model", remote, folder, progress)
        except AdapterFetchFailed as failure:
            failures = 1 if progress.fetched_bytes > before else failures + 1
            if not may_continue(failure) or failures >= MAX_ATTEMPTS:
                raise
            pause = min(failure.retry_after * 2 ** (failures - 1), RETRY_LATER_SECONDS) * random.uniform(0.8, 1.2)  # noqa: S311
            log.warning("model_fetch_failed", reason=failure.message, seconds=round(pause, 1))
            await asyncio.sleep(pause * sources.time_scale)
        else:
            await asyncio.to_thread(_mark_complete, folder, settings.model_uri)
            log.info("model_fetched", folder=str(folder), bytes=progress.fetched_bytes)
            return


class _FetchLog:
    def __init__(self, sources: Sources, log_seconds: float) -> None:
        self._metrics = sources.metrics
        self._log_seconds = log_seconds
        self._logged = time.monotonic()
        self.fetched_bytes = 0

    def __call__(self, fetched_bytes: int, total: int) -> None:
        self.fetched_bytes = fetched_bytes
        self._metrics.model_bytes.set(fetched_bytes)
        self._metrics.model_total.set(total)
        if time.monotonic() - self._logged >= self._log_seconds:
            self._logged = time.monotonic()
            log.info("model_fetch_progress", bytes=fetched_bytes, total=total or None)


def _mark_complete(folder: Path, source: str) -> None:
    """After all that was fetched is on the disk: if the machine fails, files that are not may be shorter then."""
    files = [path for path in folder.iterdir() if path.is_file() and path.name != COMPLETE]
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
    kept = {"source": source, "files": {path.name: _stamp(path) for path in files}}
    (folder / COMPLETE).write_bytes(orjson.dumps(kept))


def _is_complete(folder: Path) -> bool:
    """False if a file is missing, shorter, or another one, as after a fetch that was interrupted: then the source is
    asked, and what is missing is fetched."""
    try:
        files = orjson.loads((folder / COMPLETE).read_bytes())["files"]
        return bool(files) and files == {name: _stamp(folder / name) for name in files}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def _stamp(path: Path) -> list[int]:
    """What differs once the file is written again"""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def mark_unverified(folder: Path) -> None:
    """The pool asks for another model: the next fetch checks whether the source has changed."""
    with suppress(OSError):  # a folder that this runner has not fetched has no marker
        (folder / COMPLETE).unlink()
