"""Loads of adapters to the devices of runners (PU-07), and the replicas of `minReplicas`, which runners keep."""

from collections.abc import Collection, Iterable, Iterator

from motet.domain import Digest, InstanceName
from motet.runner_info import Tier
from motet_scheduler.policy.adapters.adapter import DigestSource
from motet_scheduler.policy.adapters.adapters import Adapters
from motet_scheduler.policy.adapters.orders import Orders
from motet_scheduler.policy.effects import EnsureAdapter, PinAdapters
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import MAX_BUILDS, AdapterSpec, AdapterStage, GroupName, SchedulerConfig


class AdapterLoads:
    def __init__(self, config: SchedulerConfig, adapters: Adapters, orders: Orders) -> None:
        self._policy = config
        self._adapters = adapters
        self._orders = orders

    def load(self, runner: Runner, digest: Digest, source: DigestSource, now: float) -> EnsureAdapter:
        """Order a runner to bring an adapter to its device."""
        order = self._orders.number()
        self._orders.look_at(now + self._policy.load_retry)
        runner.adapters.ordered(order, digest, source.ref, now)
        builds = self._proved_builds(runner, digest)
        return source.ensure(order, runner.instance, digest, AdapterStage.DEVICE, proved_builds=builds)

    def replicas(self, runners: Collection[Runner], now: float) -> Iterator[PinAdapters | EnsureAdapter]:
        """Pin adapters on as many runners as their `minReplicas`, and load them there. One slot of a runner is left to
        adapters that are not pinned: else each request for one of these evicts a pinned one, which comes back."""
        groups: dict[GroupName, list[Runner]] = {}
        for runner in runners:
            if runner.takes_work:
                groups.setdefault(runner.group, []).append(runner)
        pinned: dict[InstanceName, set[Digest]] = {}
        missing: list[tuple[Runner, Digest, DigestSource]] = []
        unknown = {adapter.spec.group for adapter in self._adapters.replicated() if adapter.undecided}
        for adapter in self._adapters.replicated():
            spec = adapter.spec
            if (serving := self._adapters.usable(adapter)) is None:
                continue
            able = [
                one
                for one in groups.get(spec.group, ())
                if one.serves(serving.key.base)
                and _may_pin(one, serving.digest, pinned.get(one.instance, ()))
                and one.may_serve(serving.digest, str(spec.ref.object))
            ]
            for holder in self._to_hold(spec, serving.digest, able, now):
                pinned.setdefault(holder.instance, set()).add(serving.digest)
                if self._lacks(holder, spec, serving.digest, now):
                    missing.append((holder, serving.digest, adapter.source_of(serving)))
        for runner in runners:
            to_keep = frozenset(pinned.get(runner.instance, ()))
            if not runner.attached or to_keep == runner.pinned or (runner.pinned is None and runner.group in unknown):
                continue  # after a takeover it keeps what the last scheduler has told, until the adapters are known
            runner.pinned = to_keep
            yield PinAdapters(runner.instance, tuple(sorted(to_keep)))
        for runner, digest, source in missing:
            yield self.load(runner, digest, source, now)

    def pin_again(self, runners: Iterable[Runner]) -> None:
        """They have not heard what they were told."""
        for runner in runners:
            runner.pinned = None
        self._orders.changed = True

    def _to_hold(self, spec: AdapterSpec, digest: Digest, able: list[Runner], now: float) -> list[Runner]:
        """The runners that keep it: those that have it, then those to which it comes, then those that hold least."""
        before = [one for one in able if one.pinned is not None and digest in one.pinned]
        if len(before) == spec.min_replicas and all(one.adapters.tiers.get(digest) is Tier.DEVICE for one in before):
            return before

        def rank(one: Runner) -> tuple[int, bool, int, InstanceName]:
            kept = digest in (one.pinned or ())
            if one.adapters.tiers.get(digest) is Tier.DEVICE:
                return 0, not kept, 0, one.instance
            if one.adapters.is_awaited(digest, spec.ref, now, self._policy.load_retry):
                return 1, not kept, 0, one.instance
            failed = not one.adapters.may_be_retried(digest, spec.ref, now)
            return 3 if failed else 2, not kept, len(one.adapters.tiers), one.instance

        return sorted(able, key=rank)[: spec.min_replicas]

    def _lacks(self, runner: Runner, spec: AdapterSpec, digest: Digest, now: float) -> bool:
        """Whether to order a load."""
        if runner.adapters.tiers.get(digest) is Tier.DEVICE:
            return False
        awaited = runner.adapters.is_awaited(digest, spec.ref, now, self._policy.load_retry)
        return not awaited and runner.adapters.may_be_retried(digest, spec.ref, now)

    def _proved_builds(self, runner: Runner, digest: Digest) -> tuple[str, ...]:
        """Those of other runners of its group: if it is like one of them, it serves at once, and proves it meanwhile.
        None if one has refused these bytes: then each proves them first."""
        builds = dict[str, None]()
        for one, key in self._adapters.served_by(runner, digest):
            if one.state_of(key).refusals:
                return ()
            if one.serving is not None and one.serving.certificate is not None:
                builds |= dict.fromkeys(one.serving.certificate.proved_builds)
        return tuple(builds)[-MAX_BUILDS:]


def _may_pin(runner: Runner, digest: Digest, pinned: Collection[Digest]) -> bool:
    return digest in pinned or len(pinned) < max(1, runner.capacity.adapter_slots - 1)
