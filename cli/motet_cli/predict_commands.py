"""The commands of `motet predict`. They read the versions from the database, and write there which one shall serve: the
predictor looks for that every few seconds, also one that starts later."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson
import typer

from motet.errors import NotFound, SetupError, StateDirectoryError, StoreUnavailable
from motet.json_object import json_object
from motet.store import open_store
from motet.store import predictor_versions as table
from motet.store.predictor_versions import VersionRecord
from motet_cli.database import database_url, is_missing
from motet_cli.printer import Printer

T = TypeVar("T")

WIDTH_OF_A_PIPE = 200
QUANTILES = ("q50", "q80", "q90", "q95")


def ls(data_dir: Path, *, as_json: bool) -> int:
    found = _versions(data_dir)
    if as_json:
        typer.echo(_json({"versions": [document_of(one) for one in found]}))
    elif found:
        columns = ("version", "role", "created", "answers", "loss", "covered q90", "against serving")
        Printer(width_of_a_pipe=WIDTH_OF_A_PIPE).table(columns, [_row(document_of(one)) for one in found])
    else:
        typer.echo("There are no versions yet: the predictor makes them from answers.", err=True)
    return 0


def show(data_dir: Path, version: str, *, as_json: bool) -> int:
    document = document_of(_named(_versions(data_dir), version))
    if as_json:
        typer.echo(_json(document))
    else:
        Printer(width_of_a_pipe=WIDTH_OF_A_PIPE).table(
            ("version", document["version"]), [(name, text) for name, text in _lines(document)]
        )
    return 0


def promote(data_dir: Path, version: str) -> int:
    def choose(found: Sequence[VersionRecord]) -> VersionRecord:
        record = _named(found, version)
        if record.role == "serving":
            raise SetupError(f"version {version} serves already.")
        return record

    return _order(data_dir, choose)


def rollback(data_dir: Path) -> int:
    def choose(found: Sequence[VersionRecord]) -> VersionRecord:
        former = next((one for one in found if one.role == "former"), None)
        if former is None:
            raise SetupError(
                "no version served before this one. `motet predict promote VERSION` takes any that is kept."
            )
        return former

    return _order(data_dir, choose)


def document_of(record: VersionRecord) -> dict[str, Any]:
    """What `--json` prints about a version. Figures that are not known are null."""
    figures = json_object(record.figures)
    answers, complete = figures.get("answers") or 0, figures.get("complete") or 0
    compared = figures.get("compared")
    return {
        "version": record.version,
        "role": record.role,
        "created": record.created,
        "ordered": record.ordered,
        "bytes": record.size,
        "answers": answers,
        "loss": figures["loss"] / answers if answers else None,
        "coverage": {
            name: within / complete if complete else None
            for name, within in zip(QUANTILES, figures.get("covered") or [0] * len(QUANTILES), strict=False)
        },
        "against_serving": (
            {
                "answers": compared,
                "prompts": figures.get("prompts"),
                "gain": figures["gain"],
                "error": figures["error"],
            }
            if compared
            else None
        ),
        "decision": figures.get("decision") or "",
    }


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        one["version"],
        one["role"] + (", will serve" if one["ordered"] else ""),
        f"{one['created']:%Y-%m-%d %H:%M}",
        str(one["answers"]),
        _number(one["loss"]),
        _share(one["coverage"]["q90"]),
        _gain(one["against_serving"]),
    )


def _lines(one: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("role", one["role"]),
        ("created", f"{one['created']:%Y-%m-%d %H:%M:%S} UTC"),
        ("weights", f"{one['bytes']} bytes" if one["bytes"] else "none: running statistics alone"),
        ("answers estimated", str(one["answers"])),
        ("pinball loss, doublings of the length", _number(one["loss"])),
        *((f"answers within {name}", _share(share)) for name, share in one["coverage"].items()),
        ("against the one that serves", _gain(one["against_serving"])),
        ("decision", one["decision"] or "-"),
        *([("ordered", "the predictor lets it serve within some seconds")] if one["ordered"] else []),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _gain(against: dict[str, Any] | None) -> str:
    if against is None:
        return "-"
    prompts = f" to {against['prompts']} prompts" if against["prompts"] else ""  # an older predictor did not count them
    return f"loss lower by {against['gain']:.4f} ± {against['error']:.4f} ({against['answers']} answers{prompts})"


def _json(document: dict[str, Any]) -> str:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()


def _named(found: Sequence[VersionRecord], version: str) -> VersionRecord:
    record = next((one for one in found if one.version == version), None)
    if record is None:
        raise _unknown(version)
    return record


def _unknown(version: str) -> NotFound:
    return NotFound(f"there is no version {version} in this database. `motet predict ls` lists those that are kept.")


def _versions(data_dir: Path) -> list[VersionRecord]:
    url = database_url(data_dir)

    async def run() -> list[VersionRecord]:
        if is_missing(url):
            return []
        async with open_store(url) as store:
            return await table.all_versions(store)

    return _run(run)


def _order(data_dir: Path, choose: Callable[[Sequence[VersionRecord]], VersionRecord]) -> int:
    url = database_url(data_dir)
    chosen = choose(_versions(data_dir))

    async def run() -> bool:
        async with open_store(url) as store:
            return await table.order(store, chosen.version)

    if not _run(run):
        raise _unknown(chosen.version)  # deleted since it was chosen
    typer.echo(
        f"Version {chosen.version} serves as soon as the predictor has seen this: within 5 seconds if it runs and can "
        f"read the weights. `motet predict ls` shows it; `motet predict show {chosen.version}` says why not.",
        err=True,
    )
    return 0


def _run(run: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        return asyncio.run(run())
    except StoreUnavailable as error:
        raise StateDirectoryError(error.message) from error
