"""Things that wait for something of which there is little: who has many of them keeps nobody else waiting. Pure."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class TurnQueue(Generic[Item]):
    """Urgent things come first. Of these, and of the others, owners take turns, each with its oldest."""

    def __init__(self) -> None:
        self._urgent: OrderedDict[str, deque[Item]] = OrderedDict()
        self._others: OrderedDict[str, deque[Item]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._lines()))

    def __bool__(self) -> bool:
        return bool(self._urgent or self._others)

    def add(self, item: Item, owner: str = "", *, urgent: bool = False) -> None:
        (self._urgent if urgent else self._others).setdefault(owner, deque()).append(item)

    def take(self) -> Item:
        lines = self._urgent or self._others
        owner, own = lines.popitem(last=False)
        item = own.popleft()
        if own:
            lines[owner] = own  # behind the others
        return item

    def keep(self, wanted: Callable[[Item], bool]) -> None:
        """Forget the others."""
        for lines in (self._urgent, self._others):
            for owner, own in list(lines.items()):
                if kept := deque(filter(wanted, own)):
                    lines[owner] = kept
                else:
                    del lines[owner]

    def _lines(self) -> Iterator[deque[Item]]:
        yield from self._urgent.values()
        yield from self._others.values()
