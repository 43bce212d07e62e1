"""Copies of pages between tiers of memory. The engine makes them before the next model call, in their order."""

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    DEVICE = "device"
    """Pages that attention reads."""

    HOST = "host"
    """Pages of parked sequences (S3-11)."""


@dataclass(frozen=True, slots=True)
class Copy:
    """The pages `pages` of `source` are copied to the pages `to` of `target`, each as a whole."""

    source: Tier
    pages: tuple[int, ...]
    target: Tier
    to: tuple[int, ...]
