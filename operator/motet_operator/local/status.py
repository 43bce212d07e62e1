"""`DATA/status.json`: what `motet status --json` prints, always written as a whole, and only if it changed."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from motet.domain import ObjectName
from motet.processes import ProcessStatus
from motet.processes.records import write_atomically
from motet.resources import Problem
from motet.resources.status import AdapterRevision, Condition, StatusModel
from motet.runner_info import BatchCap, KernelState
from motet_operator.earlier_status import AwaitedKnowledge, pool_with_earlier_reports, with_earlier_checks
from motet_operator.reconcile import AdapterStatus, Plan, PoolStatus, View
from motet_operator.reconcile.adapter_history import revisions_of


class StatusFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: dict[str, Any] | None = None
        self._encoded: dict[int, tuple[dict[str, Any], orjson.Fragment]] = {}
        """Of each adapter, by the `id` of its document, which is kept with it"""

    def read(self) -> dict[str, Any]:
        """The last status, perhaps of an earlier operator; empty if there is none."""
        with suppress(OSError, ValueError):
            content = orjson.loads(self._path.read_bytes())
            if isinstance(content, dict):
                return content
        return {}

    def write(self, content: dict[str, Any]) -> bool:
        """True if it was written, False if unchanged. Raises OSError."""
        if content == self._written:
            return False
        write_atomically(self._path, orjson.dumps(content | {"adapters": self._encode(content["adapters"])}))
        self._written = content
        return True

    def _encode(self, adapters: Iterable[dict[str, Any]]) -> list[orjson.Fragment]:
        """A document that is the same object as before is not encoded again: mostly few of thousands have changed."""
        before, self._encoded = self._encoded, {}
        for one in adapters:
            self._encoded[id(one)] = before.get(id(one)) or (one, orjson.Fragment(orjson.dumps(one)))
        return [fragment for _, fragment in self._encoded.values()]


class AdapterDocuments:
    """The documents of adapters. Only those are made anew whose status is another object than in the last round."""

    def __init__(self) -> None:
        self._made: dict[ObjectName, tuple[AdapterStatus, dict[str, Any]]] = {}

    def of(self, statuses: Iterable[AdapterStatus]) -> list[dict[str, Any]]:
        before, self._made = self._made, {}
        for status in statuses:
            made = before.get(status.name)
            self._made[status.name] = made if made is not None and made[0] is status else (status, _adapter(status))
        return [document for _, document in self._made.values()]


def with_earlier_reports(
    document: dict[str, Any],
    earlier: dict[str, Any],
    view: View,
    awaited: AwaitedKnowledge,
    unheard: Mapping[ObjectName, bool],
) -> dict[str, Any]:
    """The status with what an earlier one says of `unheard` adapters, and of pools until the scheduler has reported."""
    pools, adapters = objects_from(earlier, "pools"), objects_from(earlier, "adapters")

    def adapter(one: dict[str, Any]) -> dict[str, Any]:
        stays = unheard.get(ObjectName(one["namespace"], one["name"]))
        if stays is None:
            return one
        before = adapters.get((one["namespace"], one["name"]), one)
        return before if stays else with_earlier_checks(one, before)

    return document | {
        "pools": [
            pool_with_earlier_reports(one, pools.get((one["namespace"], one["name"]), {}), declared, awaited)
            for declared, one in zip(view.pools, document["pools"], strict=True)
        ],
        "adapters": [adapter(one) for one in document["adapters"]] if unheard else document["adapters"],
    }


def status_document(
    plan: Plan,
    processes: Sequence[ProcessStatus],
    problems: Iterable[Problem],
    *,
    url: str,
    operator_pid: int,
    kernels: Mapping[str, KernelState] | None = None,
    batch_caps: Mapping[str, BatchCap] | None = None,
    adapters: AdapterDocuments | None = None,
) -> dict[str, Any]:
    """`kernels` and `batch_caps`: of the runners that have reported them, by instance. `adapters`: those of the last
    round."""
    return {
        "services": [
            {
                "name": process.name,
                "kind": process.kind,
                "pid": process.pid,
                "ready": process.ready,
                "restarts": process.restarts,
            }
            for process in sorted(processes, key=lambda process: (process.kind == "runner", process.name))
        ],
        "pools": [_pool(pool) for pool in plan.pools],
        "adapters": (adapters if adapters is not None else AdapterDocuments()).of(plan.adapters),
        "runners": [
            {"name": name, "kernels": _kernels(state)} | _batch_cap((batch_caps or {}).get(name))
            for name, state in sorted((kernels or {}).items())
        ],
        "problems": [str(problem) for problem in problems],
        "url": url,
        "operator": operator_pid,
    }


def _pool(pool: PoolStatus) -> dict[str, Any]:
    return {
        "namespace": pool.name.namespace,
        "name": pool.name.name,
        "model": pool.model,
        "replicas": pool.replicas,
        "ready": pool.ready,
        "adapters": {"registered": pool.adapters.registered},
        "conditions": [_document(condition) for condition in pool.conditions],
    }


def _adapter(adapter: AdapterStatus) -> dict[str, Any]:
    return {
        "namespace": adapter.name.namespace,
        "name": adapter.name.name,
        "model": adapter.model,
        "ready": adapter.serves,
        "conditions": [_document(condition) for condition in adapter.conditions],
        "certificate": _document(adapter.artifact) if adapter.artifact is not None else None,
        "revisions": [_document(one) for one in adapter.revisions],
        "resident": [{"runner": place.runner, "tier": place.tier} for place in adapter.replicas],
    }


def _kernels(state: KernelState) -> dict[str, Any]:
    since = datetime.fromtimestamp(state.since, UTC).replace(microsecond=0)
    return {"serving": state.serving, "since": since.isoformat().replace("+00:00", "Z"), "note": state.note}


def _batch_cap(cap: BatchCap | None) -> dict[str, Any]:
    """Nothing without an SLO. 0 sequences: it is not known yet."""
    if cap is None:
        return {}
    return {"batchCap": {"sequences": cap.sequences, "tokenMilliseconds": round(cap.token_seconds * 1000, 1)}}


def _document(report: StatusModel) -> dict[str, Any]:
    document: dict[str, Any] = report.model_dump(mode="json", by_alias=True)
    return document


def revisions_from(document: dict[str, Any]) -> dict[tuple[str, str], tuple[AdapterRevision, ...]]:
    """The revisions of adapters in an earlier status."""
    found: dict[tuple[str, str], tuple[AdapterRevision, ...]] = {}
    with suppress(KeyError, TypeError):
        for one in document.get("adapters", []):
            found[one["namespace"], one["name"]] = revisions_of(one)
    return found


def conditions_from(document: dict[str, Any], kind: str) -> dict[tuple[str, str], tuple[Condition, ...]]:
    """The conditions of an earlier status, so that their transition times survive a restart of the operator."""
    found: dict[tuple[str, str], tuple[Condition, ...]] = {}
    with suppress(KeyError, TypeError, ValueError):
        for each in document.get(kind, []):
            found[each["namespace"], each["name"]] = tuple(
                Condition.model_validate(condition, by_alias=True, by_name=False) for condition in each["conditions"]
            )
    return found


def objects_from(document: dict[str, Any], kind: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The pools or adapters of an earlier status."""
    with suppress(KeyError, TypeError, ValueError):
        return {(each["namespace"], each["name"]): each for each in document.get(kind, [])}
    return {}


def wanted_from(document: dict[str, Any]) -> dict[tuple[str, str], int]:
    """The wanted number of runners of each pool in an earlier status: the next operator starts with it."""
    with suppress(KeyError, TypeError, ValueError):
        return {(each["namespace"], each["name"]): int(each["replicas"]) for each in document.get("pools", [])}
    return {}
