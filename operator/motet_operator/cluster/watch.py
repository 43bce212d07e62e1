"""What the operator needs of whoever watches the API server for it, whichever library that is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from motet_operator.cluster.kinds import Kind, Object


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Who is told, in the loop in which the watch was made."""

    seen: Callable[[Kind, Object], object]
    """It is there, or has changed; from a list or from a watch."""

    deleted: Callable[[Kind, Object], object]

    opened: Callable[[str, int], None]
    """A watch begins, or goes on after a break: by its path, and from which version on."""

    restarted: Callable[[str], None]
    """A part of the watch, by its name, has ended and begins again with lists."""


class Watch(Protocol):
    """Lists some kinds and then watches them. Whatever ends a watch, it goes on where it was or begins again."""

    async def run(self) -> None:
        """Until cancelled."""

    def restart(self, kind: Kind) -> None:
        """With a list: the kind has come since, or its versions mean something else than before."""

    def ages(self) -> Mapping[str, float]:
        """Seconds since each watch last said anything, bookmarks included, by the path that is watched."""

    def forget(self, path: str) -> None:
        """It is refused, or its kind is gone: a watch that cannot say anything is none that has died."""
