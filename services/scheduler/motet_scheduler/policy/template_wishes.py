"""Adapters whose chat template no runner has sent to a gateway, and when to decide again who loads each. There may be a
thousand, and a decision looks at all runners of a group. So each is due when something about it has changed, or after
a pause."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from motet.domain import Digest, InstanceName
from motet_scheduler.policy.values import GroupName

Wanted = tuple[GroupName, Digest]


@dataclass(slots=True, eq=False)
class TemplateWish:
    group: GroupName
    digest: Digest
    since: float
    """Since when gateways could have had it, if those that hold the adapter gave it"""
    due: float = -math.inf
    loading: tuple[InstanceName, ...] = ()
    """The runners that loaded it when this was decided last"""
    namespace: str = ""
    """Of an adapter that serves it"""
    tried_at: float = -math.inf
    """When a runner was ordered to load it last"""
    turn: int = -1
    """Of the adapters with these bytes, whose source was tried last"""
    gateways: set[str] = field(default_factory=set)


class TemplateWishes:
    def __init__(self) -> None:
        self._of_gateways: dict[str, dict[Wanted, None]] = {}
        self._wishes: dict[Digest, dict[GroupName, TemplateWish]] = {}

    def told(self, gateway: str, wanted: tuple[Wanted, ...], now: float, namespace_of: Callable[[Wanted], str]) -> bool:
        """A gateway waits for these, and for no others any more. True if something changed."""
        after, before = dict.fromkeys(wanted), self._of_gateways.pop(gateway, {})
        if after:
            self._of_gateways[gateway] = after
        if after.keys() == before.keys():
            return False
        for group, digest in before.keys() - after.keys():
            of_digest = self._wishes[digest]
            of_digest[group].gateways.discard(gateway)
            if not of_digest[group].gateways:
                del of_digest[group]
            if not of_digest:
                del self._wishes[digest]
        for group, digest in after:
            of_digest = self._wishes.setdefault(digest, {})
            if (wish := of_digest.get(group)) is None:
                wish = of_digest[group] = TemplateWish(group, digest, now, namespace=namespace_of((group, digest)))
            wish.gateways.add(gateway)
        return True

    def changed(self, digest: Digest | None) -> None:
        """Other runners hold it than before, or a load of it has ended. None: a runner has come or gone."""
        for of_digest in self._wishes.values() if digest is None else (self._wishes.get(digest, {}),):
            for wish in of_digest.values():
                wish.due = -math.inf

    def due(self, now: float) -> list[TemplateWish]:
        return [wish for wish in self._all() if wish.due <= now]

    def in_turn(self, wishes: Iterable[TemplateWish]) -> list[TemplateWish]:
        """First those of a namespace that has had no turn for the longest time, and of these the one that was tried
        the longest time ago: the sources of others may be gone for ever, or never answer."""
        turns: dict[str, float] = {}
        for wish in self._all():
            turns[wish.namespace] = max(wish.tried_at, turns.get(wish.namespace, -math.inf))
        return sorted(wishes, key=lambda wish: (turns[wish.namespace], wish.tried_at))

    def loading(self, now: float) -> Counter[InstanceName]:
        """How many each runner loads, without those that are due"""
        return Counter(one for wish in self._all() if wish.due > now for one in wish.loading)

    def _all(self) -> Iterator[TemplateWish]:
        return (wish for of_digest in self._wishes.values() for wish in of_digest.values())
