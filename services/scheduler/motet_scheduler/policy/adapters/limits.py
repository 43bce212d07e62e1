"""`placement.maxReplicas`: which runners alone serve an adapter, once as many have it as it allows."""

from collections.abc import Iterable, Mapping, Sequence

from motet.domain import Digest, InstanceName
from motet.runner_info import Tier
from motet_scheduler.policy.adapters.table import AdapterTable
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import AdapterSpec, GroupName

NO_LIMIT = 1 << 31


class AdapterLimits:
    def __init__(self, table: AdapterTable, runners: Mapping[InstanceName, Runner]) -> None:
        self._table = table
        self._runners = runners
        self._most: dict[str, int] = {}
        """By namespace/name of the adapter."""
        self.lowest = NO_LIMIT
        self._answers: dict[Digest, dict[tuple[GroupName, str, str], Sequence[Runner] | None]] = {}
        """Kept until something changes: many requests ask alike."""

    def state(self, specs: Iterable[AdapterSpec]) -> set[str]:
        """Replace the limits. Returns the adapters whose limit has changed."""
        most = {str(spec.ref.object): spec.max_replicas for spec in specs if spec.max_replicas}
        changed = {adapter for adapter, _ in most.items() ^ self._most.items()}
        if changed:
            self._most, self.lowest = most, min(most.values(), default=NO_LIMIT)
            self._answers.clear()
        return changed

    def adapters_moved(self, digests: Iterable[Digest]) -> None:
        """Other runners have these than before; or one of them takes work now, or no longer."""
        if self._answers:
            for digest in digests:
                self._answers.pop(digest, None)

    def more_than_one(self, adapter: str) -> bool:
        """Whether more than one runner may serve it."""
        return self._most.get(adapter, NO_LIMIT) > 1

    def may_apply(self, adapter: str, runners: int) -> bool:
        """Whether `runners` runners may be too many for an adapter."""
        return self._most.get(adapter, NO_LIMIT) <= runners

    def holders_at_limit(self, request: Request) -> Sequence[Runner] | None:
        """The runners that alone serve its adapter. None: any does."""
        most = self._most.get(request.adapter)
        if most is None:
            return None
        having = self._table.having.get(request.digest, ())
        if most > len(having):
            return None
        answers = self._answers.setdefault(request.digest, {})
        key = (request.group, request.base, request.adapter)
        if key not in answers:
            answers[key] = self._find(request, most, map(self._runners.__getitem__, having))
        return answers[key]

    @staticmethod
    def _find(request: Request, most: int, having: Iterable[Runner]) -> Sequence[Runner] | None:
        serving = [
            runner
            for runner in having
            if (runner.takes_work or (runner.telling and not runner.unhealthy))
            and runner.group == request.group
            and runner.serves(request.base)
            and runner.may_serve(request.digest, request.adapter)
        ]
        if len(serving) < most:
            return None
        # There may be more: the limit was lowered, or a runner came back. The others keep it until they need its room.
        # Those that only list a request for it come last: they may have neither.
        serving.sort(key=lambda runner: (runner.adapters.tier_of(request.digest) is not Tier.DEVICE, runner.instance))
        return serving[:most]
