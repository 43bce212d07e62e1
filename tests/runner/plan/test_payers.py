"""Who pays for pages that several sequences hold, compared with a look at every page."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from motet_runner.plan.shared_pages import Payers


def plainly(pages, likely_left):
    """Of those that hold a page, the one that most likely ends last pays for it; of equal ones the first."""
    payer = {}
    for at in sorted(range(len(pages)), key=lambda at: -likely_left[at]):
        payer |= {page: at for page in pages[at] if page not in payer}
    return [sum(payer[page] != at for page in held) for at, held in enumerate(pages)]


def numbered(prompts):
    """Prompts as pages: equal beginnings are the same pages."""
    numbers = {}
    return [[numbers.setdefault(prompt[: end + 1], len(numbers)) for end in range(len(prompt))] for prompt in prompts]


prompts = st.lists(st.tuples(st.text("ab", max_size=6), st.integers(0, 3)), min_size=1, max_size=9)


@given(prompts, st.booleans())
def test_each_page_is_paid_by_the_one_that_most_likely_ends_last(of, with_one_more):
    pages, likely_left = numbered([prompt for prompt, _ in of]), [left for _, left in of]
    holders = Counter(page for held in (pages if with_one_more else pages[:-1]) for page in held)
    before = Payers(pages[:-1], likely_left.__getitem__, lambda page: holders[page] > 1)
    assert before.shared == plainly(pages[:-1], likely_left)
    assert before.shared_with(pages[-1], likely_left[-1], likely_left.__getitem__) == plainly(pages, likely_left)


@given(prompts, st.integers(0, 9))
def test_others_may_hold_the_pages_too(of, some):
    """As those that surely become as long as they can are asked for alone."""
    pages, likely_left = numbered([prompt for prompt, _ in of]), [left for _, left in of]
    holders = Counter(page for held in pages for page in held)
    alone = [*pages[: min(some, len(pages) - 1)], pages[-1]]
    payers = Payers(alone[:-1], likely_left.__getitem__, lambda page: holders[page] > 1)
    lefts = [*likely_left[: len(alone) - 1], likely_left[-1]]
    assert payers.shared_with(alone[-1], lefts[-1], lefts.__getitem__) == plainly(alone, lefts)
