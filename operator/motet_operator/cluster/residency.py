"""How often statuses follow where adapters lie.

Adapters come into device memory and leave it with the requests of their tenants. A status that followed each time would
be a write to the API server for each of them. Metrics follow at once, statuses once in a while. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from motet.domain import ObjectName
from motet_operator.reconcile import AdapterObject, AdapterReport


class SampledResidency:
    def __init__(self, interval: timedelta) -> None:
        self._interval = interval
        self._next: datetime | None = None
        self._shown: dict[ObjectName, AdapterReport] = {}

    def sampled(
        self, reports: Mapping[ObjectName, AdapterReport], adapters: Iterable[AdapterObject], now: datetime
    ) -> Mapping[ObjectName, AdapterReport]:
        """The reports, with the replicas of the last sample where only replicas have changed since.

        An adapter that is held by fewer runners than it asks for is not sampled: somebody waits for it, and it comes
        only once.
        """
        # The clock may have been set back.
        if self._next is None or not self._next - self._interval <= now < self._next:
            self._next = now + self._interval
            self._shown = dict(reports)
            return self._shown
        before, self._shown = self._shown, dict(reports)
        changed = {name for name, report in reports.items() if name in before and before[name] is not report}
        wanted = {
            name: one.resource.spec.placement.min_replicas
            for one in (adapters if changed else ())
            if (name := one.resource.object_name) in changed
        }
        for name in changed:
            shown, report = before[name], reports[name]
            complete = _on_device(shown) >= min(wanted.get(name, 0), _on_device(report))
            if complete and replace(report, replicas=shown.replicas) == shown:
                self._shown[name] = shown
        return self._shown


def _on_device(report: AdapterReport) -> int:
    return sum(replica.tier == "device" for replica in report.replicas)
