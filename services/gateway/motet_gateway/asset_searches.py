"""What a gateway looks for at runners, for whom, and which adapters' templates no runner has. Pure."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest

from motet.held_templates import MAX_HELD_TEMPLATES, MAX_OF_NAMESPACE

MAX_SEARCHES = 1024
"""Of one namespace. Others begin when a request asks again."""
SECONDS_PER_ASK = 0.01
"""A namespace's searches that have found nothing ask a runner once in this time, all together."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose assets they are, and so which runners may have them. Many may have the same."""

    group: str
    adapter: str = ""
    """Its digest; empty: they are the base model's."""
    namespace: str = ""


@dataclass(slots=True, eq=False)
class Search:
    digest: str
    owner: Owner
    wanted_at: float
    """When a request or a catalog has asked for it last"""
    missing: bool = False
    """All runners were asked, and none has it."""
    at_hand: bool = False
    """A runner has the adapter in memory."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """One has it now, so its runners are asked again at once."""


class Searches:
    def __init__(self) -> None:
        self._of: dict[str, dict[tuple[str, Owner], Search]] = {}
        """By namespace; none is empty."""

    def want(self, digest: str, owner: Owner, now: float, *, at_hand: bool = False) -> Search | None:
        """The search that begins; None: there is one, or there is no place for it now."""
        own = self._of.get(owner.namespace, {})
        if (search := own.get((digest, owner))) is not None:
            if at_hand and not search.at_hand:
                search.news.set()
            search.wanted_at, search.at_hand = now, at_hand
            return None
        if len(own) >= MAX_SEARCHES:
            return None
        search = own[digest, owner] = Search(digest, owner, now, at_hand=at_hand)
        self._of[owner.namespace] = own
        return search

    def end(self, search: Search) -> None:
        own = self._of[search.owner.namespace]
        del own[search.digest, search.owner]
        if not own:
            del self._of[search.owner.namespace]

    def has(self, digest: str, owner: Owner) -> bool:
        return (digest, owner) in self._of.get(owner.namespace, ())

    def of(self, digest: str) -> list[Search]:
        return [one for own in self._of.values() for one in own.values() if one.digest == digest]

    def pause(self, search: Search, runners: int) -> float:
        """Before it asks its runners again: those that are found soon do not wait for those that never are."""
        missing = sum(one.missing for one in self._of[search.owner.namespace].values())
        return SECONDS_PER_ASK * runners * missing

    def missing(self) -> Mapping[str, list[str]]:
        """By group: the adapters that a scheduler is told, with a part for each namespace."""
        parts = (islice(_missing(own.values()), MAX_OF_NAMESPACE) for own in self._of.values())
        found: dict[str, list[str]] = {}
        for one in islice(filter(None, chain.from_iterable(zip_longest(*parts))), MAX_HELD_TEMPLATES):
            found.setdefault(one.group, []).append(one.adapter)
        return found

    def take_turns(self) -> None:
        """What is told now makes way for what has found no place, as its source may be gone for ever."""
        for own in self._of.values():
            missing = [key for key, search in own.items() if search.missing]
            if len(missing) > MAX_OF_NAMESPACE:
                for key in missing[:MAX_OF_NAMESPACE]:
                    own[key] = own.pop(key)


def _missing(searches: Iterable[Search]) -> Iterable[Owner]:
    return dict.fromkeys(one.owner for one in searches if one.missing and one.owner.adapter)
