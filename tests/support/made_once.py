"""Folders that many tests want alike: each is made once in a process, and copied for whoever wants it."""

import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

_KEPT = TemporaryDirectory(prefix="motet-made-once-")


def made_once(key: object, folder: Path, make: Callable[[Path], object]) -> Path:
    """`key`: what the folder's files depend on. Its `repr` must tell all of it."""
    kept = Path(_KEPT.name) / sha256(repr(key).encode()).hexdigest()
    if not kept.exists():
        unfinished = kept.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        make(unfinished)
        unfinished.rename(kept)
    return Path(shutil.copytree(kept, folder, dirs_exist_ok=True))


def content_of(folder: Path) -> str:
    """A digest of all files in it"""
    digest = sha256()
    for file in sorted(one for one in folder.iterdir() if one.is_file()):
        digest.update(file.name.encode() + b"\0" + sha256(file.read_bytes()).digest())
    return digest.hexdigest()
