"""Copies of whole pages. The engine makes them before the next model call, in order."""

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
