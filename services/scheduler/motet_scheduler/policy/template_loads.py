"""Loads of adapters whose chat template gateways wait for. Requests for them cannot be enqueued before, so no placement
loads them."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from motet.domain import InstanceName
from motet_scheduler.policy.adapters.adapter import Adapter
from motet_scheduler.policy.adapters.adapters import Adapters
from motet_scheduler.policy.adapters.loads import AdapterLoads
from motet_scheduler.policy.adapters.orders import Orders
from motet_scheduler.policy.effects import EnsureAdapter
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.template_wishes import TemplateWish, TemplateWishes, Wanted
from motet_scheduler.policy.values import GroupName, SchedulerConfig

TEMPLATES_AT_ONCE = 4
"""Per runner: loads for the sake of a chat template alone. Others are chosen in the order of requests."""
MAX_TEMPLATES_DECIDED = 64
"""With one event: adapters whose chat template gateways wait for"""
MAX_ADAPTERS_TRIED = 16
"""With one event, of those with the same bytes"""


class TemplateLoads:
    def __init__(
        self, config: SchedulerConfig, adapters: Adapters, loads: AdapterLoads, orders: Orders, wishes: TemplateWishes
    ) -> None:
        self._policy = config
        self._adapters = adapters
        self._loads = loads
        self._orders = orders
        self._wishes = wishes

    def held(self, gateway: str, wanted: tuple[Wanted, ...], now: float) -> None:
        """A gateway waits for the chat templates of these adapters. It replaces what it said before."""
        if self._wishes.told(gateway, wanted, now, self._namespace_of):
            self._orders.changed = True

    def orders(self, runners: Collection[Runner], now: float) -> Iterator[EnsureAdapter]:
        if not (due := self._wishes.due(now)):
            return
        groups: dict[GroupName, list[Runner]] = {}
        for runner in runners:
            if runner.takes_work:
                groups.setdefault(runner.group, []).append(runner)
        coming, decided = self._wishes.loading(now), 0
        # First those that were being loaded: others may have their places.
        for wish in [one for one in due if one.loading][:MAX_TEMPLATES_DECIDED]:
            decided += 1
            if self._is_loading(wish, groups.get(wish.group, ()), coming, now):
                self._decided(wish, now)
        full = {group for group in {one.group for one in due} if not _with_place(groups.get(group, ()), coming)}
        # Mostly, if many are due, all places are taken.
        may_be = [one for one in due if one.due <= now and (one.loading or one.group not in full)]
        for wish in self._wishes.in_turn(may_be) if may_be else ():
            of_group = groups.get(wish.group, [])
            if not wish.loading and (wish.group in full or not _with_place(of_group, coming)):
                full.add(wish.group)
                continue  # it stays due
            if decided >= MAX_TEMPLATES_DECIDED:
                self._orders.look_at(now)
                return
            decided += 1
            self._decided(wish, now)
            if (order := self._order(wish, of_group, coming, now)) is not None:
                yield order

    def _decided(self, wish: TemplateWish, now: float) -> None:
        wish.due = now + self._policy.load_retry
        self._orders.look_at(wish.due)

    def _is_loading(
        self, wish: TemplateWish, runners: Iterable[Runner], coming: Counter[InstanceName], now: float
    ) -> bool:
        """Whether a runner loads it now, for whichever adapter"""
        wish.loading = tuple(one.instance for one in runners if wish.digest in one.adapters.loading)
        if wish.loading:
            coming.update(wish.loading)
            wish.since = now
        return bool(wish.loading)

    def _order(
        self, wish: TemplateWish, runners: Collection[Runner], coming: Counter[InstanceName], now: float
    ) -> EnsureAdapter | None:
        """Several adapters may have the same bytes, and the source of one may be gone. So each has its turn."""
        if self._is_loading(wish, runners, coming, now):
            return None
        adapters = self._adapters_of((wish.group, wish.digest))
        for _ in adapters[:MAX_ADAPTERS_TRIED]:
            wish.turn = (wish.turn + 1) % len(adapters)
            if (order := self._order_of(adapters[wish.turn], wish, runners, coming, now)) is not None:
                return order
        return None

    def _order_of(
        self,
        adapter: Adapter,
        wish: TemplateWish,
        runners: Iterable[Runner],
        coming: Counter[InstanceName],
        now: float,
    ) -> EnsureAdapter | None:
        """A runner that holds the adapter may have no template of it: one of an earlier version, say, or one whose disk
        has lost it. Gateways have asked there, so after a while another runner gets it."""
        digest, ref, serving = wish.digest, adapter.spec.ref, self._adapters.usable(adapter)
        if serving is None:
            return None
        able = [one for one in runners if one.serves(serving.key.base)]
        lacking = [one for one in able if digest not in one.adapters.tiers]
        if len(lacking) < len(able) and now < wish.since + self._policy.load_retry:
            return None
        free = [
            one
            for one in _with_place(lacking, coming)
            if one.adapters.may_be_retried(digest, ref, now) and one.may_serve(digest, str(ref.object))
        ]
        runner = min(free, key=lambda one: (coming[one.instance], len(one.adapters.tiers), one.instance), default=None)
        source = self._adapters.source_of(digest, str(ref.object))
        if runner is None or source is None:
            return None
        coming[runner.instance] += 1
        wish.since, wish.tried_at, wish.loading = now, now, (runner.instance,)
        return self._loads.load(runner, digest, source, now)

    def _adapters_of(self, wanted: Wanted) -> list[Adapter]:
        group, digest = wanted
        return [one for one in self._adapters.that_serve(digest) if one.spec.group == group]

    def _namespace_of(self, wanted: Wanted) -> str:
        adapters = self._adapters_of(wanted)
        return adapters[0].spec.ref.namespace if adapters else ""


def _with_place(runners: Iterable[Runner], coming: Mapping[InstanceName, int]) -> list[Runner]:
    """For one more adapter that is loaded for the sake of its chat template"""
    return [one for one in runners if coming.get(one.instance, 0) < TEMPLATES_AT_ONCE]
