"""`motet adapter check`: what a runner would say of an adapter, without a runner."""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import structlog
import typer

from motet.adapter_template import AdapterTemplate
from motet.digest import adapter_digest, adapter_files
from motet.errors import AdapterError, AdapterIncompatible, SetupError
from motet_cli.adapter_bases import Base, base_named, limits_of
from motet_cli.folders import folder_named, readable
from motet_cli.printer import Printer

if TYPE_CHECKING:
    from motet_runner.adapter_inspection import AdapterVerdict
    from motet_runner.adapters.certification import EngineLimits
    from motet_runner.adapters.recorded_answers import Comparison

SERVED, REFUSED = 0, 1
WIDTH_OF_A_PIPE = 10_000
MIB = 1024 * 1024


def check(
    data_dir: Path,
    folder: Path,
    *,
    model: str | None,
    dtype: str | None,
    max_lora_rank: int | None,
    as_json: bool,
) -> int:
    """Exit status 1: a runner would refuse the adapter, or its recorded answers are those of another model."""
    folder = adapter_folder_named(folder)
    base = base_named(model, data_dir, dtype=dtype, max_lora_rank=max_lora_rank)
    document = check_document(folder, base)
    if as_json:
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    else:
        print_check(document)
    return SERVED if document["served"] and not document.get("recorded_answers", {}).get("wrong") else REFUSED


def adapter_folder_named(folder: Path) -> Path:
    found = folder_named(folder)
    if found is None:
        what = "is no folder" if folder.expanduser().exists() else "does not exist"
        raise SetupError(f"{folder} {what}. Name the folder that PEFT's save_pretrained() has written.")
    return found


def check_document(folder: Path, base: Base) -> dict[str, Any]:
    """What `--json` prints. The base model's files are in a folder."""
    from motet_runner.adapter_inspection import verdict_on

    limits = limits_for(base)
    assert limits is not None
    with readable(folder):
        verdict = verdict_on(folder, limits, max_bytes=base.max_bytes)
        verdict, compared = _with_answers(base, limits, verdict)
    document = verdict_document(folder, base, limits, verdict)
    if compared is not None:
        document["recorded_answers"] = compared._asdict() | {"wrong": compared.wrong}
        document["warnings"] += [compared.difference] if compared.difference else []
    return document


def _with_answers(
    base: Base, limits: "EngineLimits", verdict: "AdapterVerdict"
) -> "tuple[AdapterVerdict, Comparison | None]":
    """What recorded answers show of an adapter that would be served. Only this loads the base model."""
    from motet_runner.adapter_inspection import AdapterVerdict
    from motet_runner.adapters.recorded_answers import read_recorded_answers

    found = verdict.certification
    if found is None or base.config is None or base.with_vllm:
        return verdict, None
    if (recorded := read_recorded_answers(Path(found.layout.file).parent)) is None:
        return verdict, None
    from motet_runner.answer_comparison import compare_with_engine  # imports torch

    try:
        return verdict, compare_with_engine(replace(base.config, dtype=limits.dtype), found.layout, recorded)
    except AdapterIncompatible as refusal:
        return AdapterVerdict(refusal=refusal, digest=verdict.digest, bytes=verdict.bytes), None


def limits_for(base: Base) -> "EngineLimits | None":
    """None: the base model's files are not in a folder of this machine."""
    if base.config is None:
        return None
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    with readable(base.config.model):
        return limits_of(base.config, with_vllm=base.with_vllm)


def print_found(document: dict[str, Any], *, to_errors: bool = False) -> None:
    """Also where nothing was checked."""
    if document["served"] is None:
        typer.echo(
            f"{document['model']} is not a folder of this machine, so only a runner checks the adapter.", err=True
        )
    else:
        print_check(document, to_errors=to_errors)


def print_check(document: dict[str, Any], *, to_errors: bool = False) -> None:
    printer = Printer(to_errors=to_errors, width_of_a_pipe=WIDTH_OF_A_PIPE)
    checked_for = f" ({document['dtype']}, ranks up to {document['max_lora_rank']})" if document["dtype"] else ""
    base = f"{document['model']}{checked_for}"
    if not document["served"]:
        reason = f" ({document['reason']})" if document["reason"] else ""
        printer.whole_line(("refused", "red"), f"{reason} on {base}: {document['message']}")
        return
    printer.whole_line(("served", "green"), f" on {base}")
    scales = ", ".join(f"{scale:g}" for scale in document["scales"])
    kinds = ", ".join(sorted({path.rpartition(".")[2] for path in document["linears"]}))
    printer.table(
        ("rank", f"{document['rank']}"),
        [
            ("scale", f"{scales} ({document['method']}, lora_alpha {document['alpha']:g})"),
            ("linears", f"{len(document['linears'])}: {kinds}"),
            ("size", f"{document['bytes'] / MIB:.1f} MiB"),
            ("digest", document["digest"]),
            ("template", _template(document["template_characters"])),
            *_answers(document.get("recorded_answers")),
            *(("warning", (warning, "yellow")) for warning in document["warnings"]),
        ],
    )


def verdict_for(folder: Path, base: Base, limits: "EngineLimits | None") -> "AdapterVerdict":
    """Without limits only names and sizes of the files are checked."""
    from motet_runner.adapter_inspection import AdapterVerdict, folder_with_files, verdict_on

    if limits is not None:
        return verdict_on(folder, limits, max_bytes=base.max_bytes)
    try:
        folder = folder_with_files(folder, base.max_bytes)
    except AdapterError as refusal:
        return AdapterVerdict(refusal=refusal)
    size = sum((folder / name).stat().st_size for name in adapter_files(folder))
    return AdapterVerdict(digest=adapter_digest(folder), bytes=size)


def _answers(compared: dict[str, Any] | None) -> list[tuple[str, str]]:
    if compared is None:
        return []
    off = f"off by {compared['largest']:.1e} at most, {compared['allowed']:g} is allowed"
    return [("answers", f"{compared['answers']} recorded ({compared['tokens']} tokens): {off}")]


def _characters(template: bytes) -> int:
    """0: it has none of its own"""
    return len(AdapterTemplate.decode(template).text) if template else 0


def _template(characters: int) -> str:
    return f"its own, {characters} characters" if characters else "the base model's"


def verdict_document(
    folder: Path, base: Base, limits: "EngineLimits | None", verdict: "AdapterVerdict"
) -> dict[str, Any]:
    """`served` is null if nothing was checked."""
    found, refusal = verdict.certification, verdict.refusal
    certificate = found.certificate if found is not None else None
    return {
        "adapter": str(folder),
        "model": base.uri,
        "dtype": limits.dtype if limits is not None else "",
        "max_lora_rank": limits.max_lora_rank if limits is not None else None,
        "served": found is not None if found is not None or refusal is not None else None,
        "reason": refusal.reason if refusal is not None else "",
        "message": refusal.message if refusal is not None else "",
        "method": certificate.method if certificate is not None else "",
        "rank": certificate.rank if certificate is not None else None,
        "alpha": certificate.alpha if certificate is not None else None,
        "scales": sorted({linear.scale for linear in found.layout.linears}) if found is not None else [],
        "linears": list(certificate.target_modules) if certificate is not None else [],
        "template_characters": _characters(found.template) if found is not None else None,
        "warnings": list(certificate.warnings) if certificate is not None else [],
        "digest": verdict.digest,
        "bytes": verdict.bytes,
    }
