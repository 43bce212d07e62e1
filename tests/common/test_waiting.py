"""What a wait in vain says: a build server shows only the first line of an error."""

import pytest

from testbed.last_seen import MAX_SEEN, last_seen
from tests.common.waiting import until


def test_what_was_compared_is_said() -> None:
    restarts, names = 2, ["a"]
    assert last_seen(lambda: restarts == 1) == "restarts == 1, with restarts = 2"
    assert last_seen(lambda: not names and restarts) == "not names and restarts, with names = ['a'], restarts = 2"
    assert (
        last_seen(lambda n=3: [x for x in names if n])
        == "[x for x in names if n], with [x for x in names if n] = ['a']"
    )
    found = [last_seen(one) for one in (lambda: restarts > 7, lambda: "b" in names)]
    assert found == ["restarts > 7, with restarts = 2", "'b' in names, with names = ['a']"]


def test_what_cannot_be_described_is_no_error_of_its_own() -> None:
    names: list[str] = []
    assert last_seen(names.pop) == "list.pop"
    assert last_seen(lambda: names[0] == "a") == "names[0] == 'a', with names[0] = IndexError: list index out of range"
    assert last_seen(eval("lambda: 1 == 2")) == "<lambda>"


def test_it_is_one_short_line() -> None:
    text = "line\n" * 1000
    assert len(last_seen(lambda: text == "")) == MAX_SEEN
    assert "\n" not in last_seen(lambda: text == "")


async def test_a_wait_in_vain_says_what_it_saw() -> None:
    answers = iter([0, "", 7])
    assert await until(lambda: next(answers), every=0) == 7
    count = 2
    with pytest.raises(AssertionError, match=r"^not within 0 s: count == 3, with count = 2$"):
        await until(lambda: count == 3, 0)
