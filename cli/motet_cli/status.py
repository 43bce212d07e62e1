"""`motet status`: prints the operator's status file, and asks the kernel which processes are alive."""

from pathlib import Path
from typing import Any

import orjson
import typer

from motet.processes import ProcessRecord, ProcessRecords
from motet_cli.answer_figures import COLUMNS, read_figures, row, weights_made
from motet_cli.printer import Part, Printer
from motet_cli.readiness import read_status, ready_of
from motet_operator.local.lock import is_held
from motet_operator.local.state_directory import StateDirectory

NOTHING_RUNS = 1

WIDTH_OF_A_PIPE = 10_000
"""The width of tables in a pipe. Programs that read it need each row in one line, so nothing is folded."""

CHECKS = ("Accepted", "ArtifactReady", "Certified")
"""Conditions of an adapter that describe its newest revision. `Ready` describes the revision that serves."""


def status(data_dir: Path, *, as_json: bool) -> int:
    layout = StateDirectory.of(data_dir)
    operator, records = _records(layout)
    running = any(record.alive for record in records)
    document = document_of(layout)
    document["answers"] = read_figures(layout.metrics_socket("gateway")) if running else []
    document["weights_made"] = weights_made(layout.metrics_socket("predictor")) if running else None
    notes = _notes(layout, operator, running=running)
    if as_json:
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
        for note in notes:
            typer.echo(note, err=True)
    else:
        print_status(document, notes)
    return 0 if running else NOTHING_RUNS


def document_of(layout: StateDirectory) -> dict[str, Any]:
    """The document that `--json` prints."""
    _, records = _records(layout)
    written = read_status(layout) if any(record.alive for record in records) else {}
    return {
        "services": [_service(record) for record in records],
        "pools": written.get("pools", []),
        "adapters": written.get("adapters", []),
        "runners": written.get("runners", []),
        "problems": written.get("problems", []),
        "url": written.get("url", ""),
    }


def _records(layout: StateDirectory) -> tuple[ProcessRecord | None, list[ProcessRecord]]:
    operator = ProcessRecords(layout.operator_records).read().get("operator")
    services = ProcessRecords(layout.service_records).read()
    return operator, [*([operator] if operator is not None else []), *services.values()]


def _service(record: ProcessRecord) -> dict[str, Any]:
    alive = record.alive
    return {
        "name": record.name,
        "kind": record.kind,
        "pid": record.pid if alive else None,
        "ready": record.ready and alive,
        "restarts": record.restarts,
    }


def _notes(layout: StateDirectory, operator: ProcessRecord | None, *, running: bool) -> list[str]:
    if not running:
        return [
            f"Motet is not running (state directory {layout.data}). Start it: motet up --data-dir {layout.shell_path}"
        ]
    notes = []
    if not is_held(layout.lock):
        notes.append(
            "`motet up` has died; its services still run. "
            f"To manage them again: motet up --data-dir {layout.shell_path}. "
            f"To stop them: motet down --data-dir {layout.shell_path}"
        )
    if operator is None or not operator.alive:
        notes.append("The operator is not running, so the states of the pools and adapters below may be out of date.")
    return notes


def print_status(document: dict[str, Any], notes: list[str]) -> None:
    printer = Printer(width_of_a_pipe=WIDTH_OF_A_PIPE)
    for note in [*notes, *document["problems"]]:
        printer.whole_line((note, "yellow"))
    if document["url"]:
        printer.line(f"{document['url']}\n")
    if services := [_service_row(service) for service in document["services"]]:
        printer.table(("service", "kind", "pid", "ready", "restarts"), services)
    if made := document.get("weights_made"):
        printer.line(f"Lengths are estimated with weights of {made}.")
    if answers := [row(one) for one in document["answers"] if one["promises"]]:
        printer.table(COLUMNS, answers)
    if runners := [_runner_row(runner) for runner in document["runners"]]:
        printer.table(("runner", "computes with", "since", "note"), runners)
    if pools := [_pool_row(pool) for pool in document["pools"]]:
        printer.table(("pool", "model", "ready", "why"), pools)
    if adapters := [_adapter_row(adapter) for adapter in document["adapters"]]:
        printer.table(("adapter", "model", "ready", "resident", "why"), adapters)


def _service_row(service: dict[str, Any]) -> list[Part]:
    pid = str(service["pid"]) if service["pid"] is not None else "-"
    return [service["name"], service["kind"], pid, _mark(service["ready"]), str(service["restarts"])]


def _runner_row(runner: dict[str, Any]) -> list[Part]:
    kernels, notes = runner["kernels"], []
    if cap := runner.get("batchCap"):
        at_most = f"at most {cap['sequences']}" if cap["sequences"] else "not bounded yet"
        notes.append(f"requests at once, by the pool's slo: {at_most}")
    if kernels["note"]:
        notes.append(kernels["note"])
    return [runner["name"], kernels["serving"], kernels["since"], "; ".join(notes) or "-"]


def _pool_row(pool: dict[str, Any]) -> list[Part]:
    count = f"{pool['ready']}/{pool['replicas']}"
    return [f"{pool['namespace']}/{pool['name']}", pool["model"], count, _ready_reason(pool)]


def _adapter_row(adapter: dict[str, Any]) -> list[Part]:
    places = ", ".join(f"{place['runner']} ({place['tier']})" for place in adapter["resident"])
    name = f"{adapter['namespace']}/{adapter['name']}"
    return [name, adapter["model"], _mark(adapter["ready"]), places or "-", _ready_reason(adapter)]


def _mark(ready: bool) -> Part:
    return ("yes", "green") if ready else ("no", "red")


def _ready_reason(item: dict[str, Any]) -> str:
    ready = ready_of(item)
    if ready.get("status") != "True":
        return explanation(ready)
    refused = refusal_of(item)
    return str(ready["reason"]) + (f", but {explanation(refused)}" if refused else "")


def refusal_of(item: dict[str, Any]) -> dict[str, Any]:
    """The condition that refuses the newest revision of an adapter; empty if none does."""
    return next((one for one in item["conditions"] if one["type"] in CHECKS and one["status"] == "False"), {})


def explanation(condition: dict[str, Any]) -> str:
    return ": ".join(part for part in (condition.get("reason"), condition.get("message")) if part)
