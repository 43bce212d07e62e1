"""Requests that cannot even be read yet, because it takes a runner that is not there, or that still checks their
adapter: they wait here, in order.

The scheduler is told how many there are: that is what brings a pool back from zero, and keeps it up meanwhile.
"""

from collections import Counter
from collections.abc import Callable, Mapping


class Held:
    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._groups: dict[str, str] = {}
        """By request, the oldest first."""

    def __len__(self) -> int:
        return len(self._groups)

    def enter(self, request: str, group: str) -> None:
        """Wait for a runner of this group. Says nothing when it does already."""
        if self._groups.get(request) != group:
            self._groups[request] = group
            self._changed()

    def leave(self, request: str) -> None:
        if self._groups.pop(request, None) is not None:
            self._changed()

    def position(self, request: str) -> int:
        """Where it stands among those of its group, from 1; 0 when it does not wait here."""
        group = self._groups.get(request)
        if group is None:
            return 0
        return 1 + [one for one, its in self._groups.items() if its == group].index(request)

    def by_group(self) -> Mapping[str, int]:
        return Counter(self._groups.values())
