"""The names that transformers finds in the files of all its models, kept for the next start of an engine.

transformers reads all these files, about 2,000, to know which of them to import for a name. Reading them takes twenty
times as long as asking when each was changed.
"""

import hashlib
import marshal
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE = "transformers-names"
MODELS = "models"

Names = Any
"""What `create_import_structure_from_path` of transformers returns: dictionaries and sets of texts"""


def keeping(find: Callable[[str], Names], kept_in: Path | None) -> Callable[[str | Path], Names]:
    """`find`, but the names of all models come from a file if no file of theirs has changed since. `kept_in`: None:
    nothing is kept between processes."""

    def names_in(path: str | Path) -> Names:
        folder = str(path).removesuffix("/__init__.py")  # transformers names a folder in both ways, and `find` keeps it
        if kept_in is None or Path(folder).name != MODELS:
            return find(folder)
        if folder not in known:
            known[folder] = _kept(folder, find, kept_in / FILE)
        return known[folder]

    known: dict[str, Names] = {}
    return names_in


def _kept(folder: str, find: Callable[[str], Names], file: Path) -> Names:
    found: Names
    stamp = hashlib.sha256("\n".join((sys.version, *_files(folder))).encode()).digest()
    with suppress(OSError, EOFError, ValueError, TypeError):  # of a damaged file, too
        kept = file.read_bytes()
        if kept.startswith(stamp):
            found = marshal.loads(kept[len(stamp) :])  # noqa: S302 - compiled kernels, which run, lie beside it
            return found
    found = find(folder)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_name(f"{FILE}.{os.getpid()}")
        written.write_bytes(stamp + marshal.dumps(found))
        written.replace(file)
    return found


def _files(folder: str) -> Iterator[str]:
    """Each file with its size and time"""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _files(entry.path)
            else:
                status = entry.stat()
                yield f"{entry.path} {status.st_size} {status.st_mtime_ns}"
