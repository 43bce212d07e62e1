"""`motet status`: prints the operator's status file, and asks the kernel which processes are alive."""

from pathlib import Path
from typing import Any

import orjson
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from motet.processes import ProcessRecord, ProcessRecords
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
    notes = _notes(layout, operator, running=running)
    if as_json:
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
        for note in notes:
            typer.echo(note, err=True)
    else:
        _print(document, notes)
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


def _print(document: dict[str, Any], notes: list[str]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_A_PIPE
    for note in [*notes, *document["problems"]]:
        console.print(note, style="yellow", markup=False, soft_wrap=True)
    if document["url"]:
        console.print(f"{document['url']}\n", markup=False)
    if document["services"]:
        table = _table("service", "kind", "pid", "ready", "restarts")
        for service in document["services"]:
            pid = str(service["pid"]) if service["pid"] is not None else "-"
            table.add_row(service["name"], service["kind"], pid, _mark(service["ready"]), str(service["restarts"]))
        console.print(table)
    if document["runners"]:
        table = _table("runner", "computes with", "since", "note")
        for runner in document["runners"]:
            kernels = runner["kernels"]
            table.add_row(runner["name"], kernels["serving"], kernels["since"], escape(kernels["note"]) or "-")
        console.print(table)
    if document["pools"]:
        table = _table("pool", "model", "ready", "why")
        for pool in document["pools"]:
            count = f"{pool['ready']}/{pool['replicas']}"
            table.add_row(f"{pool['namespace']}/{pool['name']}", pool["model"], count, _ready_reason(pool))
        console.print(table)
    if document["adapters"]:
        table = _table("adapter", "model", "ready", "resident", "why")
        for adapter in document["adapters"]:
            places = ", ".join(f"{place['runner']} ({place['tier']})" for place in adapter["resident"])
            name = f"{adapter['namespace']}/{adapter['name']}"
            table.add_row(name, adapter["model"], _mark(adapter["ready"]), places or "-", _ready_reason(adapter))
        console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _mark(ready: bool) -> str:
    return "[green]yes[/]" if ready else "[red]no[/]"


def _ready_reason(item: dict[str, Any]) -> str:
    ready = ready_of(item)
    if ready.get("status") != "True":
        return _explanation(ready)
    refused = next((one for one in item["conditions"] if one["type"] in CHECKS and one["status"] == "False"), None)
    return str(ready["reason"]) + (f", but {_explanation(refused)}" if refused is not None else "")


def _explanation(condition: dict[str, Any]) -> str:
    return ": ".join(part for part in (condition.get("reason"), condition.get("message")) if part)
