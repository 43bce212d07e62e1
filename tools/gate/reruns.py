"""The ledger of reruns: which tests passed only when they ran once more, in the last runs of their file.

A rerun that passes does not fail a run. A test that needs one again and again hides a defect, so it fails at last.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tools.gate.records import FILE, replace_file

LEDGER = FILE.with_name("reruns.json")
RUNS = 20
"""How many runs of a file count."""
TOO_MANY = 3
"""A test fails when it needs its rerun in so many of them."""


@dataclass(frozen=True)
class FileReruns:
    """The reruns of one file of tests. They count as long as the file has the same content."""

    content: str
    """A hash."""
    runs: int = 0
    """The runs of the file since its first rerun."""
    needed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For each test that needed a rerun, the numbers of these runs."""


Ledger = dict[str, FileReruns]
_LEDGER = TypeAdapter(Ledger)


class DamagedLedger(Exception):
    pass


def counted(ledger: Ledger, contents: Mapping[str, str], needed: Collection[str]) -> Ledger:
    """The ledger after one more run. `contents` has a hash of each file that ran. Pure.

    Only reruns of the last RUNS runs stay, so the ledger cannot grow: few files are run again in one run.
    """
    after = dict(ledger)
    for file, content in contents.items():
        known = ledger.get(file)
        before = known if known is not None and known.content == content else FileReruns(content)
        run = before.runs + 1
        tests = {test: (run,) for test in needed if test.partition("::")[0] == file}
        tests |= {test: (*numbers, *tests.get(test, ())) for test, numbers in before.needed.items()}
        recent = {test: tuple(one for one in numbers if one > run - RUNS) for test, numbers in tests.items()}
        after[file] = FileReruns(content, run, {test: numbers for test, numbers in recent.items() if numbers})
    return {file: one for file, one in after.items() if one.needed}


def too_often(ledger: Ledger, needed: Collection[str]) -> list[str]:
    """Of the tests that needed a rerun just now, those that needed too many."""
    found = {test for one in ledger.values() for test, numbers in one.needed.items() if len(numbers) >= TOO_MANY}
    return [test for test in needed if test in found]


def read() -> Ledger:
    """Without files that are gone."""
    try:
        return {file: one for file, one in _LEDGER.validate_json(LEDGER.read_bytes()).items() if Path(file).is_file()}
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        raise DamagedLedger(f"The ledger of reruns, {LEDGER}, cannot be read. It begins anew.") from error


def write(ledger: Ledger) -> None:
    replace_file(LEDGER, _LEDGER.dump_json(ledger, indent=1))


def contents_of(files: Collection[str]) -> dict[str, str]:
    return {
        file: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for file in files if (path := Path(file)).is_file()
    }
