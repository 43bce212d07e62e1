"""The ledger of reruns: which tests passed only when they ran once more, in the last runs of their file.

A rerun that passes does not fail a run. A test that needs one again and again hides a defect, so it fails at last.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tools.gate.records import FILE, replace_file

LEDGER = FILE.with_name("reruns.json")
RUNS = 20
"""How many runs of a file count."""
TOO_MANY = 3
"""A test that needs its rerun in this number of them fails."""


@dataclass(frozen=True)
class FileReruns:
    """The reruns of one file of tests with one content."""

    runs: int = 0
    """The runs of the file with this content since its first rerun."""
    needed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For each test that needed a rerun, the numbers of these runs."""
    others: int = 0
    """The runs since then in which this content did not run: other checkouts have other contents, and take turns."""


Ledger = dict[str, dict[str, FileReruns]]
"""By file, and by a hash of its content"""
_LEDGER = TypeAdapter(Ledger)


class DamagedLedger(Exception):
    pass


def counted(ledger: Ledger, contents: Mapping[str, str], needed: Collection[str]) -> Ledger:
    """The ledger after one more run. `contents` has a hash of each file that ran. Pure.

    Only reruns of the last RUNS runs stay, and contents that ran in one of them, so the ledger cannot grow: few files
    are run again in one run.
    """
    after = {
        file: {content: replace(one, others=one.others + 1) for content, one in known.items()}
        for file, known in ledger.items()
    }
    for file, content in contents.items():
        before = ledger.get(file, {}).get(content, FileReruns())
        run = before.runs + 1
        tests = {test: (run,) for test in needed if test.partition("::")[0] == file}
        tests |= {test: (*numbers, *tests.get(test, ())) for test, numbers in before.needed.items()}
        recent = {test: tuple(one for one in numbers if one > run - RUNS) for test, numbers in tests.items()}
        of_content = FileReruns(run, {test: numbers for test, numbers in recent.items() if numbers})
        after.setdefault(file, {})[content] = of_content
    kept = {
        file: {content: one for content, one in known.items() if one.needed and one.others < RUNS}
        for file, known in after.items()
    }
    return {file: known for file, known in kept.items() if known}


def too_often(ledger: Ledger, contents: Mapping[str, str], needed: Collection[str]) -> list[str]:
    """Of the tests that needed a rerun just now, those that needed too many with what their files contain now."""
    ran = [ledger.get(file, {}).get(content, FileReruns()) for file, content in contents.items()]
    found = {test for one in ran for test, numbers in one.needed.items() if len(numbers) >= TOO_MANY}
    return [test for test in needed if test in found]


def read() -> Ledger:
    try:
        return _LEDGER.validate_json(LEDGER.read_bytes())
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
