"""The forecast of a batch as plainly as it can be said, from all of its sequences at once: slow, and the reference."""

from collections.abc import Sequence

import numpy as np

from motet.domain import PAGE_TOKENS
from motet_runner.plan.forecast import DEVIATIONS, MAX_STEPS, Prospect, log_survival


def steps_until(end: float) -> list[float]:
    steps = [0.0, 2.0, 4.0, 6.0, 8.0]
    while steps[-1] < MAX_STEPS:
        steps.append(float(int(steps[-1] * 1.3)))
    return [0.0, *(step for step in steps[1:] if step < end)]


def largest_need(
    of: Sequence[Prospect], shared: Sequence[int] = (), at_least: int = 0, *, page_tokens: int = PAGE_TOKENS
) -> tuple[int, tuple[int, ...]]:
    if not of:
        return 0, ()
    steps = np.array(steps_until(max(one.most - one.generated for one in of)))
    runs, pages = np.empty((len(of), len(steps))), np.empty((len(of), len(steps)))
    for place, (one, paid) in enumerate(zip(of, shared or [0] * len(of), strict=True)):
        lengths = one.generated + steps
        survival = log_survival(lengths, [np.asarray(part) for part in one.law])
        runs[place] = np.where(lengths >= one.most, 0, np.exp(survival - survival[0]))
        runs[place, 0] = 1
        pages[place] = np.minimum(np.ceil((one.tokens + steps) / page_tokens), one.most_pages) - paid
    expected = runs * pages
    deviation = np.sqrt((expected * (pages - expected)).sum(axis=0))
    needs = np.minimum(expected.sum(axis=0) + DEVIATIONS * deviation, (pages * (runs > 0)).sum(axis=0))
    at = int(needs.argmax())
    need = max(int(np.ceil(needs[at])), at_least)
    return need, divided(need, expected[:, at])


def shared_pages(of: Sequence[Prospect], pages: Sequence[Sequence[int]]) -> list[int]:
    """How many of each one's pages are those of one that most likely ends later."""
    shared, paid = [0] * len(of), set[int]()
    for at in sorted(range(len(of)), key=lambda at: of[at].likely_left, reverse=True):
        shared[at] = sum(page in paid for page in pages[at])
        paid.update(pages[at])
    return shared


def charges(
    of: Sequence[Prospect], pages: Sequence[Sequence[int]], *, page_tokens: int = PAGE_TOKENS
) -> tuple[int, ...]:
    """What each is charged, with the pages that it holds: at least what those surely need together whose answers become
    as long as they can."""
    sure = [(one, held) for one, held in zip(of, pages, strict=True) if one.surely_longest]
    of_sure, held_by_sure = [one for one, _ in sure], [held for _, held in sure]
    shared_by_sure, at_least = shared_pages(of_sure, held_by_sure), 0
    if sure:
        at_least = pages_of_longest_lives(of_sure, shared_by_sure, page_tokens=page_tokens)
    return largest_need(of, shared_pages(of, pages), at_least, page_tokens=page_tokens)[1]


def divided(pages: int, weights: np.ndarray) -> tuple[int, ...]:
    """One page for each, and the others by weight and largest remainder."""
    beyond = np.maximum(0, weights * (pages / weights.sum()) - 1)
    left = pages - len(weights)
    exact = beyond * (left / beyond.sum()) if left else beyond * 0
    shares = np.floor(exact)
    shares[np.argsort(shares - exact, kind="stable")[: left - int(shares.sum())]] += 1
    return tuple((shares + 1).astype(int).tolist())


def sum_of_ends(of: Sequence[Prospect], *, page_tokens: int = PAGE_TOKENS) -> int:
    return sum(pages_after(max(0, one.most - one.generated - 1), one, page_tokens) for one in of)


def pages_after(step: int, one: Prospect, page_tokens: int) -> int:
    return min(-(-(one.tokens + step) // page_tokens), one.most_pages)


def pages_of_longest_lives(of: Sequence[Prospect], shared: Sequence[int], *, page_tokens: int = PAGE_TOKENS) -> int:
    """Each compared with each."""
    ends = [max(0, one.most - one.generated - 1) for one in of]
    each = list(zip(of, ends, shared, strict=True))
    return max(
        sum(pages_after(end, one, page_tokens) - paid for one, its_end, paid in each if its_end >= end) for end in ends
    )
