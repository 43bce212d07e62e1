"""Whether a stack is ready, from its process records and status file. It does not matter who started the processes."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from motet.clock import Clock, monotonic
from motet.errors import SETUP_FAILED
from motet.processes import ProcessRecord, ProcessRecords
from motet_operator.local.state_directory import StateDirectory

SERVICES = ("scheduler", "predictor", "supervisor", "gateway")
MAX_CRASHES = 3
"""After this many deaths of a process in a row, the start has failed. A few are normal while other services start."""

ADAPTER_SECONDS = 10.0
"""How long to wait for the checks of adapters after everything else is ready. They leave the processors to all that
runs. A slower one goes on in the background."""


@dataclass(frozen=True, kw_only=True)
class StartupReady:
    status: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StartupFailed:
    who: str
    reason: str
    log: Path
    exit_status: int = 1


@dataclass
class StartupWatch:
    """Each call of `look` reads the files. `records` and `status` keep the last result for the output of `motet up`."""

    layout: StateDirectory
    fingerprint: str = ""
    """The fingerprint of the new operator. Another one that still runs does not count. Empty: any operator counts."""

    earlier: Mapping[str, ProcessRecord] = field(default_factory=dict)
    """The records before this start, and as long as an operator from before it works. Their failures say nothing about
    it."""

    clock: Clock = monotonic
    records: dict[str, ProcessRecord] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    _pools_since: float | None = None

    def look(self) -> StartupReady | StartupFailed | None:
        self.records = read_records(self.layout)
        self.status = read_status(self.layout)
        if not self._counts(self.records.get("operator")):
            self.status = {}  # an earlier operator has written it
            if self.earlier:
                ours = {name: record for name, record in self.earlier.items() if record.kind == "operator"}
                self.earlier = {name: one for name, one in self.records.items() if one.kind != "operator"} | ours
        for record in self.records.values():
            if record == self.earlier.get(record.name):
                continue
            if record.failures and not record.ready and not record.alive:
                hopeless = record.exit_status == SETUP_FAILED
                if hopeless or record.failures >= MAX_CRASHES:
                    return _failure(record)
        return StartupReady(status=self.status) if self._is_ready() else None

    def _counts(self, operator: ProcessRecord | None) -> bool:
        if operator is None or not operator.alive or (self.fingerprint and operator.fingerprint != self.fingerprint):
            return False
        return self.status.get("operator") == operator.pid

    def too_late(self, seconds: float) -> StartupFailed:
        waiting = [name for name, record in self.records.items() if not record.ready]
        waiting += [
            f"pool {pool['namespace']}/{pool['name']}"
            for pool in self.status.get("pools", [])
            if pool["ready"] < pool["replicas"]
        ]
        who = ", ".join(waiting) or "motet up"
        log = Path(self.records[waiting[0]].log) if waiting and waiting[0] in self.records else self.layout.logs
        return StartupFailed(who=who, reason=f"not ready after {seconds:g} s", log=log)

    def _is_ready(self) -> bool:
        services = {service["name"]: service for service in self.status.get("services", [])}
        if not services.keys() >= set(SERVICES) or not all(service["ready"] for service in services.values()):
            return False
        if not all(pool["ready"] >= pool["replicas"] for pool in self.status["pools"]):
            return False
        if self._pools_since is None:
            self._pools_since = self.clock()
        # All pools are ready, so an adapter that waits for a runner is loaded by its first request.
        verdicts = [ready_of(adapter) for adapter in self.status["adapters"]]
        undecided = [
            one for one in verdicts if one.get("status") == "Unknown" and one.get("reason") != "WaitingForRunner"
        ]
        return not undecided or self.clock() - self._pools_since > ADAPTER_SECONDS


def _failure(record: ProcessRecord) -> StartupFailed:
    status = SETUP_FAILED if record.exit_status == SETUP_FAILED else 1
    return StartupFailed(who=record.name, reason=record.reason, log=Path(record.log), exit_status=status)


def read_records(layout: StateDirectory) -> dict[str, ProcessRecord]:
    """Of the operator and the services, by name."""
    return ProcessRecords(layout.operator_records).read() | ProcessRecords(layout.service_records).read()


def read_status(layout: StateDirectory) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = orjson.loads(layout.status.read_bytes())
        if isinstance(content, dict):
            return content
    return {}


def ready_of(item: dict[str, Any]) -> dict[str, Any]:
    """The condition Ready of a pool or adapter; empty if it has none yet."""
    return next((condition for condition in item["conditions"] if condition["type"] == "Ready"), {})
