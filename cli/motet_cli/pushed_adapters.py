"""The adapters that `motet adapter push` has copied into the state directory, and the manifests that it has written.

DATA/adapters/<hex digest>/           the files of one adapter
DATA/adapters/<hex digest>.manifests  the manifests that were written for it, also of other folders
FOLDER/<namespace>.<name>.pushed.yaml in the folder that `motet up` watches

Files are copied into a hidden folder, which is renamed once they are whole. All changes are made under one lock.
"""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer
import yaml

from motet.clock import monotonic
from motet.digest import adapter_digest, digest_from_hex, hex_of
from motet.disk import sync_folder
from motet.domain import Digest, ObjectName
from motet.errors import NotFound, SetupError, StateDirectoryError
from motet.processes.records import write_atomically
from motet.resources import API_VERSION, LoRAAdapter, Manifest, ServingPool, files_of, read_file, read_text
from motet.sources import FOLDER
from motet_cli.local_stack import LocalStack
from motet_cli.status import document_of
from motet_operator.local.manifest_folder import DeclaredObjects
from motet_runner.sources.folder import AdapterFolder, FolderBounds, adapter_folder

LOCK = ".lock"
POLL_SECONDS = 0.05
SILENT_SECONDS = 1.0
"""Who waits longer for the lock is told for what."""

RECORDS = ".manifests"
HEADER = "# `motet adapter push` has written this file; `motet adapter rm` removes it and the adapter's files.\n"


class PushedAdapters:
    def __init__(self, stack: LocalStack) -> None:
        self.folder = stack.layout.data / "adapters"
        self._stack = stack

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Waits for other commands. What they have left half-done is removed."""
        with _disk_errors(f"use {self.folder}"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(lock)
            for left in self.folder.glob(".*-*"):
                _remove(left)
            yield
        finally:
            os.close(lock)

    def _take(self, lock: int) -> None:
        deadline = monotonic() + SILENT_SECONDS
        while monotonic() < deadline:
            with suppress(BlockingIOError):
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(POLL_SECONDS)
        typer.echo(f"Waiting for another `motet adapter` command, which has locked {self.folder / LOCK}.", err=True)
        return fcntl.flock(lock, fcntl.LOCK_EX)

    # ------------------------------------------------------------------------------------------------------ the files

    @staticmethod
    def source(folder: Path, below: Path | None) -> AdapterFolder:
        """Raises AdapterFetchFailed if it lies outside of `below`."""
        return adapter_folder(folder, None if below is None else FolderBounds(below.resolve(), str(below)))

    @contextmanager
    def copied(self, source: Path, max_bytes: int, below: Path | None = None) -> Iterator[Path]:
        """A copy of an adapter's files, which is removed afterwards if it was not kept. Raises AdapterFetchFailed if a
        file is missing, too large or no file, or lies outside of `below`."""
        found = self.source(source, below)
        files = found.stat_files(max_bytes)
        draft = self.folder / f".push-{os.getpid()}"
        try:
            with _disk_errors(f"copy {found.path} to {self.folder}"):
                draft.mkdir()
                for file in files:
                    with os.fdopen(found.open(file.name), "rb") as read, (draft / file.name).open("xb") as written:
                        shutil.copyfileobj(read, written)
                        written.flush()
                        os.fsync(written.fileno())
            if found.stat_files(max_bytes) != files:
                raise SetupError(f"{found.path} changes while it is copied. Push it again once it is saved.")
            yield draft
        finally:
            _remove(draft)

    def keep(self, draft: Path, digest: Digest) -> Path:
        """The place of these files. Equal files are there only once."""
        place = self.place_of(digest)
        with _disk_errors(f"write {place}"):
            if place.exists() and not _is_whole(place, digest):
                _remove(place)
            if not place.exists():
                draft.rename(place)
                sync_folder(self.folder)
        return place

    def place_of(self, digest: Digest) -> Path:
        return self.folder / hex_of(digest)

    def remove_unused(self) -> list[Digest]:
        """Removes the files that nothing names: neither a manifest, also one in a folder that `motet up` does not watch
        now, nor what the operator has accepted, nor the revision that serves."""
        removed = []
        with _disk_errors(f"remove files of {self.folder}"):
            try:
                named = self._named_in_use()
            except OSError:
                return []  # nothing can tell what is in use
            for place in list(self.folder.iterdir()):
                with suppress(ValueError):
                    digest = digest_from_hex(place.name)
                    if digest in named or any(_may_name(Path(one), digest) for one in self._recorded(digest)):
                        continue
                    place.rename(trash := self.folder / f".trash-{place.name}")
                    _remove(trash)
                    self._records(digest).unlink(missing_ok=True)
                    removed.append(digest)
        return removed

    def _named_in_use(self) -> set[Digest]:
        layout = self._stack.layout
        found = {
            one["certificate"]["digest"]
            for one in document_of(layout)["adapters"]
            # Other adapters may have the same files from elsewhere.
            if one["certificate"] and self.manifest_of(ObjectName(one["namespace"], one["name"])).exists()
        }
        for file in (layout.accepted_manifests, *files_of(self._stack.watched)):
            with suppress(FileNotFoundError):
                found |= _digests_in(file.read_bytes())
        return found

    def _recorded(self, digest: Digest) -> list[str]:
        with suppress(FileNotFoundError):
            return self._records(digest).read_text(errors="surrogateescape").splitlines()
        return []

    def _records(self, digest: Digest) -> Path:
        return self.folder / (hex_of(digest) + RECORDS)

    # -------------------------------------------------------------------------------------------------- the manifests

    def manifest_of(self, name: ObjectName) -> Path:
        return self._stack.watched / f"{name.namespace}.{name.name}.pushed.yaml"

    def named_by(self, name: ObjectName) -> set[Digest]:
        """What the manifest names; empty if no push has written one."""
        with suppress(FileNotFoundError):
            return _digests_in(self.manifest_of(name).read_bytes())
        return set()

    def declared(self, name: ObjectName, accepted: DeclaredObjects) -> LoRAAdapter | None:
        """As an earlier push has written it, with all that was changed since. Raises SetupError if the name is not free
        for a push."""
        if not self._stack.watched.is_dir():
            raise SetupError(
                f"`motet up` watches one file, {self._stack.watched}. Start it with -f and a folder: there "
                "`motet adapter push` writes a manifest for each adapter."
            )
        path = self.manifest_of(name)
        for one in accepted.adapters:
            if one.resource.object_name == name and one.place.file != str(path):
                raise SetupError(
                    f"{name} is declared at {one.place}, which `motet adapter push` has not written. Change that "
                    "manifest, or choose another name."
                )
        with _disk_errors(f"read {path}"):
            if not path.exists() or _is_lost(path.read_bytes()):
                return None
        reading = read_file(path)
        for problem in reading.problems:
            raise SetupError(
                f"{problem}. Correct this manifest, or remove it with `motet adapter rm {name.name} "
                f"-n {name.namespace}`."
            )
        return _only(name, reading.manifests, path)

    def declare(self, name: ObjectName, pool: ServingPool, digest: Digest) -> bool:
        """Writes the manifest. False: it has named these files before. Other fields stay as they are."""
        path = self.manifest_of(name)
        document: dict[str, Any] = {
            "apiVersion": API_VERSION,
            "kind": "LoRAAdapter",
            "metadata": {"name": name.name, "namespace": name.namespace},
            "spec": {"poolRef": {"name": pool.group.name, "namespace": pool.group.namespace}},
        }
        with _disk_errors(f"write {path}"):
            before = path.read_text() if path.exists() else ""
            if not _is_lost(before.encode()):
                (document,) = (one for one in yaml.safe_load_all(before) if one is not None)
            # Not as_uri: manifests take no '%'.
            document["spec"]["source"] = {"uri": f"{FOLDER.prefix}{self.place_of(digest)}", "digest": digest}
            text = HEADER + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=200)
            if text == before:
                return False
            for problem in read_text(text).problems:
                raise SetupError(f"no manifest can name {self.folder}, so use another --data-dir: {problem.message}")
            recorded = self._recorded(digest)
            if str(path) not in recorded:
                lines = "".join(f"{one}\n" for one in (*recorded, path))
                write_atomically(self._records(digest), lines.encode(errors="surrogateescape"), durable=True)
            write_atomically(path, text.encode(), durable=True)
        return True

    def withdraw(self, name: ObjectName) -> set[Digest]:
        """Removes the manifest. The files that it has named. Raises SetupError if it is not one that a push has
        written."""
        path = self.manifest_of(name)
        if path.exists():
            with _disk_errors(f"remove {path}"):
                text = path.read_bytes()
                reading = read_file(path)
                if not reading.problems and not _is_lost(text):
                    _only(name, reading.manifests, path)
                elif not _is_lost(text) and (not text.startswith(HEADER.encode()) or b"\n---" in text):
                    raise SetupError(f"{reading.problems[0]}. Correct this manifest first: it may declare more.")
                path.unlink()
            return _digests_in(text)
        for one in self._stack.declared().adapters:
            if one.resource.object_name == name:
                raise SetupError(
                    f"{name} is declared at {one.place}, which `motet adapter push` has not written. Remove it there."
                )
        raise NotFound(f"no adapter {name} has been pushed to this stack. `motet adapter ls` lists all adapters.")


def name_of(namespace: str, name: str, *, given_as: str, namespace_as: str = "--namespace") -> ObjectName:
    """Raises SetupError for what can't be the name of an object. `given_as`, `namespace_as`: where the command has
    them."""
    metadata = {"name": name, "namespace": namespace}
    text = yaml.safe_dump({"apiVersion": API_VERSION, "kind": "LoRAAdapter", "metadata": metadata})
    for problem in read_text(text).problems:
        if problem.field.startswith("metadata.") or not problem.field:  # without one, it is no text
            option = namespace_as if problem.field == "metadata.namespace" else given_as
            raise SetupError(f"{option}: {problem.message}")
    return ObjectName(namespace, name)


def _only(name: ObjectName, found: Sequence[Manifest], path: Path) -> LoRAAdapter:
    resources = [one.resource for one in found]
    if len(resources) != 1 or not isinstance(resources[0], LoRAAdapter) or resources[0].object_name != name:
        raise SetupError(f"{path} does not declare {name} alone. Move what else is in it to another file.")
    return resources[0]


def _is_whole(place: Path, digest: Digest) -> bool:
    try:
        return adapter_digest(place) == digest
    except FileNotFoundError:
        return False


def _is_lost(manifest: bytes) -> bool:
    """After a crash of the machine a file may be empty, or have zeros in the place of its content."""
    return not manifest.strip(b"\0 \t\r\n")


def _digests_in(text: bytes) -> set[Digest]:
    return {digest_from_hex(found.decode()) for found in re.findall(rb"[0-9a-f]{64}", text)}


def _may_name(manifest: Path, digest: Digest) -> bool:
    """Also if nothing can tell: its folder may be on a disk that is not mounted now."""
    try:
        text = manifest.read_bytes()
        return _is_lost(text) or digest in _digests_in(text)
    except FileNotFoundError:
        return not manifest.parent.is_dir()
    except OSError:
        return True


@contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateDirectoryError(
            f"cannot {what}: {error.strerror or error}. Free some space, or correct the permissions."
        ) from error


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
