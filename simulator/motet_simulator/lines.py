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
from itertools import islice
from pathlib import Path
from typing import IO, Any

from motet.errors import SetupError

MAX_LINE_BYTES = 1 << 20
"""The longest line. One of Mooncake's longest prompts has a few kilobytes."""

MAX_ROWS = 5_000_000
"""The most rows of a workload or a table."""

MAX_TOKENS = 1 << 24
"""Of a prompt or an answer: more than any model's context."""

MAX_NUMBER = 1e9
"""Of a time in seconds, and of what else a row may say."""


class BadRow(SetupError):
    def __init__(self, file: Path, line: int, why: str) -> None:
        super().__init__(f"{file}, line {line}: {why}.")


def numbered_lines(file: Path, *, bounded: bool = True) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers from 1 on. Each has its end, but for the last one of a file that
    lacks it. `.gz` is unpacked on the way. `bounded`: a file of more than MAX_ROWS is refused."""
    number = 0
    try:
        if file.exists() and not file.is_file():
            raise SetupError(f"{file} is no regular file. Save what it has in one, and name that.")
        with _opened(file) as opened:
            while line := opened.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise BadRow(file, number, f"it is longer than {MAX_LINE_BYTES >> 20} MiB")
                if bounded and number > MAX_ROWS:
                    raise BadRow(file, number, f"a file has at most {MAX_ROWS:,} rows; cut it")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise BadRow(file, number, "it is no text in UTF-8") from None
                if text.strip():
                    yield number, text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadRow(file, number + 1, f"the compressed file is damaged there ({error})") from error
    except OSError as error:
        raise SetupError(f"{file}: {error.strerror or error}.") from error


def csv_rows(file: Path, lines: Iterator[tuple[int, str]]) -> tuple[list[str], Iterator["Row"]]:
    """The columns that the next line names, and the rows below it."""
    columns = [name.strip() for number, line in islice(lines, 1) for name in _values(file, number, line)]
    return columns, _below(file, columns, lines)


def csv_with(file: Path, wanted: AbstractSet[str]) -> Iterator["Row"]:
    """The rows of a CSV file. Raises SetupError if it lacks one of these columns."""
    columns, rows = csv_rows(file, numbered_lines(file))
    if missing := wanted - set(columns):
        raise SetupError(f"{file} has no column {min(missing)} in its first line.")
    return rows


def _below(file: Path, columns: list[str], lines: Iterator[tuple[int, str]]) -> Iterator["Row"]:
    for number, line in lines:
        values = _values(file, number, line)
        if len(values) != len(columns):
            raise BadRow(file, number, f"it has {len(values)} values, and the header {len(columns)} columns")
        yield Row(file, number, dict(zip(columns, values, strict=True)))


def _values(file: Path, number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line.strip()]))
    except csv.Error as error:
        raise BadRow(file, number, f"it is no row of a CSV file ({error})") from None


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

    def __init__(self, file: Path, line: int, values: Mapping[str, Any]) -> None:
        self.file = file
        self.line = line
        self._values = values

    @property
    def names(self) -> AbstractSet[str]:
        return self._values.keys()

    def bad(self, why: str) -> BadRow:
        return BadRow(self.file, self.line, why)

    def tokens(self, name: str, *, least: int = 1) -> int:
        value = self._number(name)
        if not least <= value <= MAX_TOKENS or value != int(value):
            given = _short(self._values.get(name))
            raise self.bad(f"{name} is {given}: it must be a whole number from {least} to {MAX_TOKENS}")
        return int(value)

    def count(self, name: str) -> int:
        """A number that only grows with others, such as of pairs of tokens."""
        value = self._values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
            raise self.bad(f"{name} is {_short(value)}: it must be a whole number")
        return value

    def number(self, name: str) -> float:
        value = self._number(name)
        if not 0 <= value <= MAX_NUMBER:
            given = _short(self._values.get(name))
            raise self.bad(f"{name} is {given}: it must be a number from 0 to {MAX_NUMBER:g}")
        return value

    def _number(self, name: str) -> float:
        given = self._values.get(name)
        try:
            return float(given) if not isinstance(given, bool) else math.nan  # type: ignore[arg-type]
        except OverflowError:
            return math.inf
        except (TypeError, ValueError):
            raise self.bad(f"{name} is {_short(given)}: it must be a number") from None

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
