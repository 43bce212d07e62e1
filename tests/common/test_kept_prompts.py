import tracemalloc

import pytest

from motet.errors import Declined
from motet.kept_prompts import MAX_KEPT, KeptPrompts


def test_a_prompt_is_known_by_its_number():
    kept = KeptPrompts()
    assert kept.note(1, (5, 6)) == (5, 6)
    assert kept.note(1) == (5, 6)
    assert 1 in kept
    assert kept.note(0, (7,)) == (7,)
    assert 0 not in kept
    with pytest.raises(Declined):
        kept.note(2)


def test_both_ends_forget_the_same_prompts():
    """The least recently used ones, of any sequence of numbers."""
    gateway, runner = KeptPrompts(), KeptPrompts()
    for number in (1, 2, 3, 1, 4, 5, 1, 2, 6, 7, 1, 3):
        has = number in gateway
        gateway.note(number, (0,))
        assert runner.note(number, () if has else (number,)) == (number,)
    assert sum(number in gateway for number in range(9)) == MAX_KEPT


def test_a_prompt_that_is_kept_takes_few_bytes():
    """A runner keeps those of each gateway, also when their requests have ended."""
    kept, tokens = KeptPrompts(), 100_000
    tracemalloc.start()
    try:
        kept.note(1, tuple(range(1000, 1000 + tokens)))
        bytes_kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bytes_kept < 5 * tokens
    assert kept.note(1) == tuple(range(1000, 1000 + tokens))
