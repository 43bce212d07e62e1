"""Adapters whose chat template no runner has sent to a gateway, and when to decide again who loads each. There may be a
thousand, and a decision looks at all runners of a group. So each is due when something about it has changed, or after
a pause."""

import math
from collections import Counter
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
    gateways: set[str] = field(default_factory=set)


class TemplateWishes:
    def __init__(self) -> None:
        self._of_gateways: dict[str, dict[Wanted, None]] = {}
        self._wishes: dict[Digest, dict[GroupName, TemplateWish]] = {}

    def told(self, gateway: str, wanted: tuple[Wanted, ...], now: float) -> bool:
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
            of_digest.setdefault(group, TemplateWish(group, digest, now)).gateways.add(gateway)
        return True

    def changed(self, digest: Digest | None) -> None:
        """Other runners hold it than before, or a load of it has ended. None: a runner has come or gone."""
        for of_digest in self._wishes.values() if digest is None else (self._wishes.get(digest, {}),):
            for wish in of_digest.values():
                wish.due = -math.inf

    def due(self, now: float) -> list[TemplateWish]:
        """First those that were being loaded: others may have their places."""
        due = [wish for some in self._wishes.values() for wish in some.values() if wish.due <= now]
        return sorted(due, key=lambda wish: not wish.loading)

    def loading(self, now: float) -> Counter[InstanceName]:
        """How many each runner loads, without those that are due"""
        some = (wish for of_digest in self._wishes.values() for wish in of_digest.values() if wish.due > now)
        return Counter(one for wish in some for one in wish.loading)
