"""Who asks for which adapter: Punica's four laws (PU-25), and one with a long tail.

Punica derives the number of adapters from the number of requests: of 1,000 requests, Distinct has 1,000 adapters,
Uniform 32, Skewed 16, Identical one.
"""

import random
from bisect import bisect_left
from collections.abc import Iterator
from enum import StrEnum
from itertools import accumulate, count
from math import ceil, log, sqrt

MAX_ADAPTERS = 100_000
"""Of a plan: the scheduler of each simulation knows them all."""

SKEW = 1.5
"""Each adapter of the skewed law has this many times as many requests as the next one."""


class Law(StrEnum):
    DISTINCT = "distinct"
    """Each request another adapter."""
    UNIFORM = "uniform"
    """All alike."""
    SKEWED = "skewed"
    """Each 1.5 times as often as the next one."""
    IDENTICAL = "identical"
    """One for all."""
    ZIPF = "zipf"
    """The n-th one 1/n times as often as the first: a few that many ask for, and many that few ask for."""


def adapters_of(law: Law, requests: int) -> int:
    """How many adapters Punica's workload of this number of requests has."""
    match law:
        case Law.DISTINCT | Law.ZIPF:
            return max(1, requests)
        case Law.UNIFORM:
            return max(1, ceil(sqrt(requests)))
        case Law.SKEWED:
            return max(1, ceil(log(1 + max(1, requests) * (SKEW - 1), SKEW) - 1e-9))
        case Law.IDENTICAL:
            return 1


def names(adapters: int) -> list[str]:
    return [_name(number) for number in range(adapters)]


def choices(law: Law, adapters: int, seed: int) -> Iterator[str]:
    """The adapter of one request after the other, without end."""
    chance = random.Random(f"{law} {seed}")
    if law is Law.IDENTICAL:
        adapters = 1
    if law is Law.DISTINCT:
        yield from (_name(number % adapters) for number in count())
    if law in (Law.UNIFORM, Law.IDENTICAL):
        while True:
            yield _name(chance.randrange(adapters))
    ratio = (SKEW ** -min(number, 1000) for number in range(adapters))
    weights = ratio if law is Law.SKEWED else (1 / (number + 1) for number in range(adapters))
    cumulated = list(accumulate(weights))
    while True:
        yield _name(min(bisect_left(cumulated, chance.random() * cumulated[-1]), adapters - 1))


def _name(number: int) -> str:
    return f"adapter-{number}"
