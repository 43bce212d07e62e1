"""Which rows of an iteration belong to which adapter: the input of each back end's `make_batch`."""

from typing import NamedTuple


class PlacedAdapter(NamedTuple):
    """A loaded adapter: all bytes of its run (`run_layout.py`) are in the memory."""

    name: str
    """The adapter's digest: equal names mean equal bytes, wherever the runs are."""
    offset: int
    """Where its run begins, in bytes from the start of the memory."""
    rank: int
    """The rank of the run's layout, which is a multiple of the back end's tile."""
    linears: frozenset[str]
    """The linears that the adapter changes. Its run holds zeros for all others."""
    product_rank: int = 0
    """0 for a plain LoRA, whose products have `rank`. Else the rank of the products, rounded up to the tile, of an
    adapter that also scales and shifts the linears' own results: see `RunLayout.scaling`."""

    @property
    def scales(self) -> bool:
        return self.product_rank > 0


class Segment(NamedTuple):
    """Rows [start, stop) of the batch use the adapter."""

    start: int
    stop: int
    adapter: PlacedAdapter
