"""A file that a command writes: it is there as a whole, or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from motet.errors import SetupError


@contextmanager
def output_file(path: Path) -> Iterator[TextIO]:
    """What is written goes to a file beside, which takes the place of `path` at the end. Something else than a regular
    file, such as /dev/stdout, is written to as it is. Raises SetupError, at once if there is no place for it."""
    try:
        if path.exists() and not path.is_file():
            with path.open("w") as file:
                yield file
            return
        target = path.resolve()  # a link stays one
        beside = target.with_name(f".motet-{os.getpid()}.part")
        try:
            with beside.open("w") as file:
                yield file
            beside.replace(target)
        except BaseException:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror or error}.") from error
