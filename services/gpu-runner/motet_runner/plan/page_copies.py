"""Operations on whole pages of memory. The engine carries them out before the next model call, in order."""

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    DEVICE = "device"
    """Pages that attention reads."""

    HOST = "host"
    """Pages of parked sequences (S3-11)."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies whole pages: `pages` of `source` to `to` of `target`."""

    source: Tier
    pages: tuple[int, ...]
    target: Tier
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wipe:
    """Zeroes pages. Contents that were no KV may not be finite, and attention multiplies masked values, too."""

    tier: Tier
    pages: tuple[int, ...]


Effect = Copy | Wipe
