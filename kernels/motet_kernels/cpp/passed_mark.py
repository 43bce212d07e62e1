"""A file beside a library marks that the library has passed its test on this machine. It makes the next start seconds
shorter.

A process that loads the library removes the file, and writes it again once the library works. If the library crashes
the process, the next process finds no file, and tests the library again.
"""

import hashlib
import platform
import sys
from pathlib import Path

import torch

from motet_kernels.cpp.compiler import cpu_flags

CODE = Path(__file__).parents[1]


class PassedMark:
    """If the file cannot be written, as in an image with a read-only root, each start tests the library."""

    def __init__(self, library: Path) -> None:
        self._library = library
        self._file = mark_of(library)
        self._facts = ""
        self._stays = ""
        """Why this process could not take the mark, and ignores it"""

    def take(self) -> bool:
        """Remove the mark. Returns True if exactly these bytes have passed on this machine."""
        try:
            self._facts = self._find_facts()
            passed = self._file.read_text(encoding="utf-8")
            self._file.unlink()
        except (FileNotFoundError, UnicodeDecodeError):
            return False
        except OSError as error:
            self._stays = error.strerror or str(error)
            return False
        return passed == self._facts

    def put(self) -> str:
        """Marks the bytes that the library had when the mark was taken. A file that has replaced it is not marked.

        → why the next start finds no usable mark; empty if the next start finds one
        """
        try:
            self._file.write_text(self._facts, encoding="utf-8")
        except OSError as error:
            return error.strerror or str(error)
        return self._stays

    def _find_facts(self) -> str:
        """A hash of what the test's result depends on, except the libraries that this library links to."""
        digest = hashlib.sha256(self._library.read_bytes())
        for part in (platform.platform(), *sorted(cpu_flags()), sys.version, torch.__version__):
            digest.update(part.encode() + b"\0")
        for path in sorted(CODE.rglob("*.py")):
            digest.update(path.read_bytes() + b"\0")
        return digest.hexdigest()


def mark_of(library: Path) -> Path:
    return library.with_suffix(".passed")
