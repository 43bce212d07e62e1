"""Whose rows are whose: what benchmarks of adapters assume of their traffic. Each gives the owner of every row."""

import random

ZIPF_ADAPTERS, ZIPF_EXPONENT, SKEW = 100, 1.5, 1.5


def distinct(rows: int) -> list[int]:
    return list(range(rows))


def uniform(rows: int) -> list[int]:
    """As many adapters as each has rows."""
    adapters = round(rows**0.5)
    return sorted(row % adapters for row in range(rows))


def skewed(rows: int) -> list[int]:
    """Each adapter has 1.5 times the rows of the next."""
    owners: list[int] = []
    share = rows * (1 - 1 / SKEW)
    while len(owners) < rows:
        owners += [len(set(owners))] * max(1, round(share))
        share /= SKEW
    return owners[:rows]


def zipf(rows: int) -> list[int]:
    """Drawn from 100 adapters; the k-th most popular one has a weight of k to the power of -1.5."""
    weights = [rank**-ZIPF_EXPONENT for rank in range(1, ZIPF_ADAPTERS + 1)]
    drawn = random.Random(0).choices(range(ZIPF_ADAPTERS), weights, k=rows)
    place = {owner: number for number, owner in enumerate(sorted(set(drawn)))}
    return sorted(place[owner] for owner in drawn)


def identical(rows: int) -> list[int]:
    return [0] * rows


def among(adapters: int, owners: list[int]) -> list[int]:
    """The same traffic where there are only `adapters` adapters: they take turns."""
    return [owner % adapters for owner in owners]


TRAFFIC = {"distinct": distinct, "uniform": uniform, "skewed": skewed, "zipf": zipf, "identical": identical}
