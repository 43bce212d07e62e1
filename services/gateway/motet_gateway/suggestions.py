"""The names nearest to one that does not exist, found without comparing it with all of them. Pure."""

import difflib
from bisect import bisect_left
from collections.abc import Iterable

NEAREST = 3
_COMPARED = 64
"""Characters of a name that are compared: comparing takes time with the square of them. Names of tenants and adapters
have at most 63 each, and a slip shows long before the end."""
_NEIGHBOURS = 8
"""Names looked at on either side of where the wrong one would stand in each order."""


class NameIndex:
    """In the order of their beginnings and of their endings: a slip of the pen leaves one of the two as it is."""

    def __init__(self, names: Iterable[str]) -> None:
        self._forward = sorted(set(names))
        self._backward = sorted(name[::-1] for name in self._forward)

    def nearest(self, name: str, *others: "NameIndex") -> list[str]:
        """The best first, of these and of `others`. Takes about as long with ten thousand names as with thirty."""
        candidates = set[str]().union(*(names._nearby(name) for names in (self, *others)))
        wanted = name[:_COMPARED]
        by_beginning: dict[str, str] = {}
        for candidate in sorted(candidates):
            by_beginning.setdefault(candidate[:_COMPARED], candidate)
        close = difflib.get_close_matches(wanted, by_beginning, n=NEAREST, cutoff=0.0)
        return [by_beginning[beginning] for beginning in close]

    def _nearby(self, name: str) -> set[str]:
        return {*_around(self._forward, name), *(near[::-1] for near in _around(self._backward, name[::-1]))}


def _around(ordered: list[str], name: str) -> list[str]:
    at = bisect_left(ordered, name)
    return ordered[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]


def shown(name: str) -> str:
    """A name from a client, as an error repeats it."""
    return name if len(name) <= 2 * _COMPARED else f"{name[: 2 * _COMPARED]}…"
