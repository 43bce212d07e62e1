"""Whether a library has passed its test on this machine: a file beside it says so, and the next start is seconds
shorter.

The file is removed while a process begins to use the library. If that crashes the process, the next one tests the
library again.
"""

import hashlib
import platform
import sys
from pathlib import Path

import torch

from motet_kernels.cpp.compiler import cpu_flags

CODE = Path(__file__).parents[1]


class PassedMark:
    """If files cannot be written, as in an image with a read-only root, there is no mark: each start tests again."""

    def __init__(self, library: Path) -> None:
        self._library = library
        self._file = mark_of(library)
        self._facts = ""
        self._stays = ""
        """Why the mark cannot be taken, and so is ignored"""

    def take(self) -> bool:
        """Remove the mark. Returns True if this very library has passed on this machine."""
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
        """Marks the library as passed, as it was when the mark was taken. A later replacement has not passed.

        → why the next start finds no usable mark; empty if it finds one
        """
        try:
            self._file.write_text(self._facts, encoding="utf-8")
        except OSError as error:
            return error.strerror or str(error)
        return self._stays

    def _find_facts(self) -> str:
        """A hash of everything that the test's result depends on."""
        digest = hashlib.sha256(self._library.read_bytes())
        for part in (platform.platform(), *sorted(cpu_flags()), sys.version, torch.__version__):
            digest.update(part.encode() + b"\0")
        for path in sorted(CODE.rglob("*.py")):
            digest.update(path.read_bytes() + b"\0")
        return digest.hexdigest()


def mark_of(library: Path) -> Path:
    return library.with_suffix(".passed")
