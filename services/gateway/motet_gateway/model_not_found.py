"""The error for a model that does not exist, with similar names. It compares with few names, not with all. Pure."""

import difflib
from bisect import bisect_left
from collections.abc import Iterable

from motet.errors import ModelNotFound

NEAREST = 3
_COMPARED = 64
"""Characters of a name that are compared, since the time grows with their square. Names of tenants and adapters have at
most 63 characters each."""
_NEIGHBOURS = 8
"""Candidates on either side of the wrong name in each sorted list."""


class NameIndex:
    """Names sorted forwards and backwards: after one typing error, the beginning or the end still matches."""

    def __init__(self, names: Iterable[str]) -> None:
        self._forward = sorted(set(names))
        self._backward = sorted(name[::-1] for name in self._forward)

    def nearest(self, name: str, *others: "NameIndex") -> list[str]:
        """The most similar names of these and of `others`, the best first. The time hardly grows with their number."""
        candidates = set[str]().union(*(names.nearby(name) for names in (self, *others)))
        wanted = name[:_COMPARED]
        by_beginning: dict[str, str] = {}
        for candidate in sorted(candidates):
            by_beginning.setdefault(candidate[:_COMPARED], candidate)
        close = difflib.get_close_matches(wanted, by_beginning, n=NEAREST, cutoff=0.0)
        return [by_beginning[beginning] for beginning in close]

    def nearby(self, name: str) -> set[str]:
        """The names beside this one in both orders."""
        return {*_around(self._forward, name), *(near[::-1] for near in _around(self._backward, name[::-1]))}


def model_not_found(name: str, known: NameIndex, *others: NameIndex) -> ModelNotFound:
    """`known` and `others`: the names that the caller may use."""
    nearest = known.nearest(name, *others)
    hint = f"Nearest names: {', '.join(nearest)}." if nearest else "No model is served here yet."
    return ModelNotFound(f"The model '{shown(name)}' does not exist or you may not use it. {hint}", param="model")


def _around(ordered: list[str], name: str) -> list[str]:
    at = bisect_left(ordered, name)
    return ordered[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]


def shown(name: str) -> str:
    """A name from a client, as an error repeats it."""
    return name if len(name) <= 2 * _COMPARED else f"{name[: 2 * _COMPARED]}…"
