"""Folders that a command names."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from motet.errors import SetupError


def expanded(path: Path | str) -> Path:
    """`~` and `~user` are folders of the machine's users."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SetupError(f"{path} can't be read: {error}") from error


def folder_named(path: Path | str) -> Path | None:
    """None: there is no such folder. Raises SetupError if nothing can tell."""
    folder = expanded(path)
    with readable(folder):
        return folder if folder.is_dir() else None


@contextmanager
def readable(path: Path | str, option: str = "") -> Iterator[None]:
    """SetupError for errors of the file system, and for names that no output can have. `option`: which names it"""
    try:
        str(path).encode()
        yield
    except UnicodeEncodeError:
        raise SetupError(f"the name of the folder {str(path)!r} is not UTF-8. Rename it.") from None
    except OSError as error:
        named = f"{option}: " if option else ""
        raise SetupError(f"{named}{error.filename or path} can't be read: {error.strerror}.") from error
