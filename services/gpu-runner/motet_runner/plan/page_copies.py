"""What is done with whole pages of memory. The engine does it before the next model call, in its order."""

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


@dataclass(frozen=True, slots=True)
class Wipe:
    """The pages become zeros. A page that was no KV may hold numbers that are not finite, and attention multiplies what
    it masks, too."""

    tier: Tier
    pages: tuple[int, ...]


Effect = Copy | Wipe
