"""Runner sets as processes: which instances exist, at which revision, and which of them are leaving.

The table is stored on disk, so that a restarted operator knows the instances that it adopts.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import structlog
from pydantic import TypeAdapter, ValidationError

from motet.domain import ObjectName
from motet.processes import ProcessSpec, ProcessStatus
from motet.processes.records import write_atomically
from motet_operator.local.service_specs import ServiceSpecs
from motet_operator.reconcile import ExistingSet, Plan, RunnerDrain, RunnerInstance, RunnerSet, RunnerTemplate
from motet_operator.sync import UnhealthyRunner

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRunner:
    """One runner process as the operator decided it."""

    name: str
    pool: ObjectName
    revision: str
    ordinal: int
    template: RunnerTemplate
    drain_seconds: float
    draining_until: datetime | None = None
    replaced: str = ""
    """The incarnation that was killed because it was unhealthy: late reports about it must not kill its successor."""


_RUNNER = TypeAdapter(LocalRunner)
_STORED = TypeAdapter(tuple[LocalRunner, ...])
"""With every field there is. What the file lacked would be another runner: an adopted process would be replaced."""


class RunnerTable:
    def __init__(self, path: Path, services: ServiceSpecs) -> None:
        self._path = path
        self._services = services
        self._table = _read(path)
        self._unhealthy_pids: dict[str, int | None] = {}
        self._starting: dict[str, tuple[int | None, datetime]] = {}
        """Since when a process of this pid has not been ready, by instance."""
        self._drains: dict[str, RunnerDrain] = {}

    def __iter__(self) -> Iterator[LocalRunner]:
        return iter(self._table.values())

    def get(self, instance: str) -> LocalRunner | None:
        return self._table.get(instance)

    def specs(self, restart_wait: Callable[[LocalRunner], float] = lambda _: 0.0) -> list[ProcessSpec]:
        return [
            self._services.runner(
                runner.name, str(runner.pool), runner.revision, runner.template, partial(restart_wait, runner)
            )
            for runner in self._table.values()
        ]

    def others_serve(
        self, runner: LocalRunner, statuses: Iterable[ProcessStatus], leaving: Collection[str] = ()
    ) -> bool:
        """Whether another runner of the pool can take over this one's requests: not one that drains or is `leaving`."""
        others = {
            one.name
            for one in self._table.values()
            if one.pool == runner.pool and one.draining_until is None and one.name not in {runner.name, *leaving}
        }
        return any(status.ready and status.name in others for status in statuses)

    def sets(self) -> tuple[ExistingSet, ...]:
        members: dict[tuple[ObjectName, str], list[LocalRunner]] = {}
        for runner in self._table.values():
            members.setdefault((runner.pool, runner.revision), []).append(runner)
        return tuple(
            ExistingSet(
                pool=pool,
                revision=revision,
                template=runners[0].template,
                base=runners[0].template.base,
                replicas=len(runners),
                drain_seconds=runners[0].drain_seconds,
            )
            for (pool, revision), runners in members.items()
        )

    def instances(
        self,
        statuses: Mapping[str, ProcessStatus],
        drained: Collection[str],
        unhealthy: Mapping[str, UnhealthyRunner] | None = None,
        grace: timedelta = timedelta(0),
        *,
        attached: Collection[str] = (),
        now: datetime,
        startup: timedelta,
    ) -> tuple[RunnerInstance, ...]:
        """`grace` is how long an unhealthy runner may take to recover, `startup` how long others wait for one that is
        not ready."""
        self._note_starts(statuses, now)
        dead = {
            name: one
            for name, one in (unhealthy or {}).items()
            if name in self._table
            and one.incarnation != self._table[name].replaced
            and self._still_runs(one.incarnation, statuses.get(name))
        }
        return tuple(
            RunnerInstance(
                name=runner.name,
                pool=runner.pool,
                revision=runner.revision,
                ordinal=runner.ordinal,
                ready=runner.name in statuses and statuses[runner.name].ready,
                attached=runner.name in attached,
                draining_until=runner.draining_until,
                drained=runner.name in drained,
                unhealthy=dead[runner.name].why if runner.name in dead else "",
                replace_at=dead[runner.name].since + grace if runner.name in dead else None,
                starting_until=self._starting[runner.name][1] + startup if runner.name in self._starting else None,
                failures=statuses[runner.name].failures if runner.name in statuses else 0,
                reason=statuses[runner.name].reason if runner.name in statuses else "",
            )
            for runner in self._table.values()
        )

    def _note_starts(self, statuses: Mapping[str, ProcessStatus], now: datetime) -> None:
        before, self._starting = self._starting, {}
        for name in self._table:
            status = statuses.get(name)
            if status is None or not status.ready:
                pid = status.pid if status is not None else None
                known = before.get(name)
                self._starting[name] = known if known is not None and known[0] == pid else (pid, now)

    def _still_runs(self, incarnation: str, status: ProcessStatus | None) -> bool:
        """False if the process has ended meanwhile: its successor has another pid."""
        pid = status.pid if status is not None else None
        return self._unhealthy_pids.setdefault(incarnation, pid) == pid

    def carry_out(self, plan: Plan) -> None:
        """Apply the plan to the table. The process manager then starts and stops processes by the table."""
        before = dict(self._table)
        until = plan.deadlines
        for runner in before.values():
            if runner.draining_until != until.get(runner.name):
                log.info("runner_draining" if runner.name in until else "runner_drain_cancelled", instance=runner.name)
                self._table[runner.name] = replace(runner, draining_until=until.get(runner.name))
        for each in plan.runner_sets:
            for name in each.leaving:
                self._table.pop(name, None)
            if each.template is None:
                continue  # only scaled, and those that leave have left
            members = sum((one.pool, one.revision) == (each.pool, each.revision) for one in self._table.values())
            for _ in range(each.replicas - members):
                self._add(each, each.template)
        if self._table != before:
            self._write()

    def drains(self, plan: Plan, processes: Collection[str]) -> Collection[RunnerDrain]:
        """Runners that take no work: those that drain, and those that left the table while their processes end."""
        ending = {name: drain for name, drain in self._drains.items() if name in processes and name not in self._table}
        self._drains = ending | {drain.instance: drain for drain in plan.drains}
        return self._drains.values()

    def replaced(self, instance: str, incarnation: str) -> None:
        """Remember that this incarnation was killed, also after a restart of the operator."""
        self._table[instance] = replace(self._table[instance], replaced=incarnation)
        self._write()

    def _add(self, each: RunnerSet, template: RunnerTemplate) -> None:
        stem = f"{each.pool.name[:20].rstrip('-')}-{each.revision[:6]}"
        index = next(index for index in range(10_000) if f"{stem}-{index}" not in self._table)
        name = f"{stem}-{index}"
        self._table[name] = LocalRunner(
            name=name,
            pool=each.pool,
            revision=each.revision,
            ordinal=max((runner.ordinal for runner in self._table.values()), default=0) + 1,
            template=template,
            drain_seconds=each.drain_seconds,
        )

    def _write(self) -> None:
        with suppress(
            OSError
        ):  # the disk is full: serving goes on; only a restart of the operator would lose the table
            write_atomically(self._path, orjson.dumps([_stored(runner) for runner in self]))


def _stored(runner: LocalRunner) -> dict[str, Any]:
    """Names are objects in the file: the version before reads nothing else, and would adopt no runner."""
    found: dict[str, Any] = _RUNNER.dump_python(runner, mode="json", exclude_none=True)
    found["pool"] = runner.pool._asdict()
    found["template"]["group"] = runner.template.group._asdict()
    return found


def _read(path: Path) -> dict[str, LocalRunner]:
    with suppress(OSError, ValidationError):
        return {runner.name: runner for runner in _STORED.validate_json(path.read_bytes())}
    return {}
