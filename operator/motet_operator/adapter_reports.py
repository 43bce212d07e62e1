"""The scheduler's latest reports about adapters, merged across takeovers.

A scheduler that has just taken over learns of its runners one after the other. Until it reports a runner, the previous
scheduler's reports about that runner stay valid: the runner still holds the same adapters.
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
        """Reports of this stream."""

        self._before: dict[str, dict[ObjectName, tuple[AdapterReplica, ...]]] = {}
        """Replicas reported on the previous stream, by runner, for runners that this stream has not reported yet."""

    def stream_opened(self, runners: Collection[str]) -> None:
        """A new stream has opened; these runners exist."""
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
        """From now on this stream's adapter reports are complete for this runner."""
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
