"""Lines of files that anybody may have made: read one after the other, each with a bound, so that no file fills memory.

What is wrong is said with the file's name and the line's number.
"""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import IO, Any

from motet.errors import SetupError

MAX_LINE_BYTES = 1 << 20
"""The longest line. One of Mooncake's longest prompts has a few kilobytes."""

MAX_ROWS = 5_000_000
"""The most rows of one file. A file that never ends is refused there."""

MAX_TOKENS = 1 << 24
"""Of a prompt or an answer: more than any model's context."""

MAX_SECONDS = 1e9


class BadRow(SetupError):
    def __init__(self, file: Path, line: int, why: str) -> None:
        super().__init__(f"{file}, line {line}: {why}.")


def numbered_lines(file: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers from 1 on. `.gz` is unpacked on the way."""
    number = 0
    try:
        with _opened(file) as opened:
            while line := opened.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise BadRow(file, number, f"it is longer than {MAX_LINE_BYTES >> 20} MiB")
                if number > MAX_ROWS:
                    raise BadRow(file, number, f"a workload has at most {MAX_ROWS:,} rows; cut the file")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError:
                    raise BadRow(file, number, "it is no text in UTF-8") from None
                if text:
                    yield number, text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadRow(file, number + 1, f"the compressed file is damaged there ({error})") from error
    except OSError as error:
        raise SetupError(f"{file}: {error.strerror or error}.") from error


def table(file: Path, columns: list[str], lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a CSV file whose header has been read."""
    for number, line in lines:
        values = next(csv.reader([line]))
        if len(values) != len(columns):
            raise BadRow(file, number, f"it has {len(values)} values, and the header {len(columns)} columns")
        yield number, dict(zip(columns, values, strict=True))


def header(line: str) -> list[str]:
    return [name.strip() for name in next(csv.reader([line]))]


def json_object(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise BadRow(file, number, "it is no JSON") from None
    if not isinstance(found, dict):
        raise BadRow(file, number, "it is no JSON object")
    return found


class Row:
    """One row, and how its values are read: a wrong one is said with its line and its name."""

    def __init__(self, file: Path, number: int, values: Mapping[str, Any]) -> None:
        self.file = file
        self.number = number
        self._values = values

    @property
    def names(self) -> AbstractSet[str]:
        return self._values.keys()

    def bad(self, why: str) -> BadRow:
        return BadRow(self.file, self.number, why)

    def tokens(self, name: str, *, least: int = 1) -> int:
        value = self.seconds(name)
        if value != int(value) or not least <= value <= MAX_TOKENS:
            given = _short(self._values.get(name))
            raise self.bad(f"{name} is {given}: it must be a whole number from {least} to {MAX_TOKENS}")
        return int(value)

    def count(self, name: str) -> int:
        """A number that only grows with others, such as of pairs of tokens."""
        value = self._values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
            raise self.bad(f"{name} is {_short(value)}: it must be a whole number")
        return value

    def seconds(self, name: str) -> float:
        given = self._values.get(name)
        try:
            value = float(given) if not isinstance(given, bool) else math.nan  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            raise self.bad(f"{name} is {_short(given)}: it must be a number") from None
        if not 0 <= value <= MAX_SECONDS:
            raise self.bad(f"{name} is {_short(given)}: it must be a number from 0 to {MAX_SECONDS:g}")
        return value

    def text(self, name: str, *, default: str = "", most: int = 200) -> str:
        given = self._values.get(name, default)
        if not isinstance(given, str) or len(given) > most or not given.isprintable():
            raise self.bad(f"{name} is {_short(given)}: it must be a text of at most {most} characters")
        return given

    def get(self, name: str) -> Any:
        return self._values.get(name)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _opened(file: Path) -> gzip.GzipFile | IO[bytes]:
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")
