"""Which rows of an iteration belong to which adapter: the input of each back end's `make_batch`."""

from typing import NamedTuple


class PlacedAdapter(NamedTuple):
    """A loaded adapter: all bytes of its run (`run_layout.py`) are in the memory."""

    name: str
    """The adapter's digest: equal names mean equal bytes, wherever the runs are."""
    offset: int
    """Where its run begins, in bytes from the start of the memory."""
    rank: int
    """The adapter's rank, rounded up to the back end's tile."""
    linears: frozenset[str]
    """The linears that the adapter changes. Its run holds zeros for all others."""


class Segment(NamedTuple):
    """Rows [start, stop) of the batch use the adapter."""

    start: int
    stop: int
    adapter: PlacedAdapter
