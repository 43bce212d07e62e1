"""What the operator needs from a library that watches the API server."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from motet_operator.cluster.kinds import Kind, Object


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Callbacks, called in the event loop in which the watch was created."""

    seen: Callable[[Kind, Object], object]
    """An object exists or has changed; from a list or a watch."""

    deleted: Callable[[Kind, Object], object]

    opened: Callable[[str, int], None]
    """A watch opened or reopened: its path, and the version that it continues from."""

    restarted: Callable[[str], None]
    """An engine of the watch, by name, ended and starts again with lists."""


class Watch(Protocol):
    """Lists some kinds and then watches them. After any error a watch continues or starts again."""

    async def run(self) -> None:
        """Until cancelled."""

    def restart(self, kind: Kind) -> None:
        """List again and watch: the kind is new, or its versions went back."""

    def ages(self) -> Mapping[str, float]:
        """Seconds since each watch last received anything, bookmarks included, by watched path."""

    def forget(self, path: str) -> None:
        """The path is refused or its kind is gone: do not report its watch as silent."""
