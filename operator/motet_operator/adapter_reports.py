"""What is known of adapters: what the scheduler has said last, across its takeovers.

One that has just taken over hears of runners one after the other. What the one before has said of runners that it has
not heard of yet holds until then: they hold what they held.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from motet.domain import ObjectName
from motet_operator.reconcile import AdapterReplica, AdapterReport


class AdapterReports:
    def __init__(self) -> None:
        self.known: dict[ObjectName, AdapterReport] = {}
        self._reported: dict[ObjectName, AdapterReport] = {}
        """As it was said on this stream."""

        self._before: dict[str, dict[ObjectName, tuple[AdapterReplica, ...]]] = {}
        """Places by runner, as they were said before it, of runners of which it has said nothing yet."""

    def stream_opened(self, runners: Collection[str]) -> None:
        """A stream has come up; these runners exist."""
        before: defaultdict[str, dict[ObjectName, tuple[AdapterReplica, ...]]] = defaultdict(dict)
        for name, one in self.known.items():
            for replica in one.replicas:
                if replica.runner in runners:
                    before[replica.runner][name] = (*before[replica.runner].get(name, ()), replica)
        self._before, self._reported = dict(before), {}

    def report(self, name: ObjectName, reported: AdapterReport) -> None:
        self._reported[name] = reported
        self._merge(name)

    def runner_reported(self, runner: str) -> None:
        """From here on what is said of adapters is the whole truth about this runner."""
        for name in self._before.pop(runner, ()):
            if name in self._reported:
                self._merge(name)

    def keep_only(self, names: Collection[ObjectName]) -> None:
        self.known = {name: one for name, one in self.known.items() if name in names}
        self._reported = {name: one for name, one in self._reported.items() if name in names}

    def _merge(self, name: ObjectName) -> None:
        reported = self._reported[name]
        of = {replica.runner for replica in reported.replicas}
        more = [replica for runner, held in self._before.items() if runner not in of for replica in held.get(name, ())]
        merged = sorted((*reported.replicas, *more), key=lambda replica: (replica.runner, replica.tier))
        self.known[name] = replace(reported, replicas=tuple(merged)) if more else reported
