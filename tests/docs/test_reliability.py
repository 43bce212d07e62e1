"""The table of faults says of each what is true."""

import re

import pytest

from tests.docs.pages import DOCS, names_of_tests, rows

FAULTS = rows(DOCS / "reliability.md", "The faults we test")
MUST_BE_TESTED = (1, 2, 4, 5, 7, 8, 9, 12, 13, 14, 15, 20, 21, 22, 23, 35, 44, 45, 46, 48)


def named(state: str) -> set[str]:
    """As they are written; `test_row_4_…` is every test whose name begins so."""
    return set(re.findall(r"`(test_\w+…?)`", state))


def exists(name: str) -> bool:
    tests = names_of_tests()
    return any(test.startswith(name[:-1]) for test in tests) if name.endswith("…") else name in tests


def test_all_52_faults_are_there_in_order() -> None:
    assert [int(row[0]) for row in FAULTS] == list(range(1, 53))


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: f"row-{row[0]}")
def test_a_state_is_tested_partly_or_later_and_names_existing_tests(row: list[str]) -> None:
    _, fault, expected, state = row
    assert fault
    assert expected
    kind, _, why = state.partition(":")
    assert kind in ("tested", "partly", "later")
    assert bool(named(why)) is (kind != "later")
    assert (";" in why) is (kind == "partly"), "partly says what is missing"
    assert [name for name in named(why) if not exists(name)] == []


@pytest.mark.parametrize("number", MUST_BE_TESTED)
def test_every_fault_that_must_be_tested_is_tested(number: int) -> None:
    assert FAULTS[number - 1][3].startswith("tested: ")


def test_a_row_names_all_tests_with_its_number() -> None:
    rows_with_tests = {int(found[1]) for name in names_of_tests() if (found := re.match(r"test_row_(\d+)_", name))}
    assert {number for number in rows_with_tests if f"test_row_{number}_…" not in named(FAULTS[number - 1][3])} == set()
