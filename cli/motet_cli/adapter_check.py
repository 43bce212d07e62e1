"""`motet adapter check`: what a runner would say of an adapter, without a runner."""

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import orjson
import structlog
import typer

from motet.adapter_template import AdapterTemplate
from motet.digest import adapter_digest, adapter_files
from motet.errors import AdapterError, SetupError
from motet.resources.pool import Dtype
from motet_cli.adapter_bases import Base, base_named, limits_of
from motet_cli.folders import folder_named, readable
from motet_cli.printer import Part, Printer

if TYPE_CHECKING:
    from motet_runner.adapter_inspection import AdapterVerdict
    from motet_runner.adapters.certification import Certification, EngineLimits
    from motet_runner.offline_proof import OfflineProof

SERVED, REFUSED = 0, 1
WIDTH_OF_A_PIPE = 10_000
MIB = 1024 * 1024
OF_VLLM = "the pool's engine is vLLM, and only Motet's own is here"


def check(
    data_dir: Path,
    folder: Path,
    *,
    model: str | None,
    dtype: str | None,
    max_lora_rank: int | None,
    as_json: bool,
    proves: bool = True,
) -> int:
    """Exit status 1: a runner would refuse the adapter, its recorded answers are those of another model, or PEFT
    computes something else. `proves`: load the base model, too."""
    if dtype is not None and dtype not in get_args(Dtype):
        raise SetupError(f"--dtype {dtype!r} is unknown. Choose one of {', '.join(get_args(Dtype))}.")
    folder = adapter_folder_named(folder)
    base = base_named(model, data_dir, dtype=dtype, max_lora_rank=max_lora_rank)
    document = check_document(folder, base, proves=proves)
    if as_json:
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    else:
        print_check(document)
    wrong = any((document.get(compared) or {}).get("wrong") for compared in ("recorded_answers", "peft"))
    return SERVED if document["served"] and not wrong else REFUSED


def adapter_folder_named(folder: Path) -> Path:
    found = folder_named(folder)
    if found is None:
        what = "is no folder" if folder.expanduser().exists() else "does not exist"
        raise SetupError(f"{folder} {what}. Name the folder that PEFT's save_pretrained() has written.")
    return found


def check_document(folder: Path, base: Base, *, proves: bool = True) -> dict[str, Any]:
    """What `--json` prints. The base model's files are in a folder."""
    from motet_runner.adapter_inspection import AdapterVerdict, verdict_on

    limits = limits_for(base)
    assert limits is not None
    with readable(folder):
        verdict = verdict_on(folder, limits, max_bytes=base.max_bytes)
        found = None
        if verdict.certification is not None and proves:
            try:
                found = _proof_of(base, limits, verdict.certification)
            except AdapterError as refusal:
                verdict = AdapterVerdict(refusal=refusal, digest=verdict.digest, bytes=verdict.bytes)
    document = verdict_document(folder, base, limits, verdict)
    return document if found is None else document | proof_document(found, document)


def _proof_of(base: Base, limits: "EngineLimits", found: "Certification") -> "OfflineProof":
    """Raises AdapterError if a runner would refuse the adapter after all."""
    from motet_runner.adapters.recorded_answers import read_recorded_answers
    from motet_runner.offline_proof import OfflineProof, prove  # imports torch

    assert base.config is not None
    recorded = read_recorded_answers(Path(found.layout.file).parent) is not None
    if base.with_vllm:
        return OfflineProof(not_proved=OF_VLLM, not_with_peft=OF_VLLM)
    return prove(replace(base.config, dtype=limits.dtype), found.layout, recorded=recorded)


def proof_document(found: "OfflineProof", checked: dict[str, Any]) -> dict[str, Any]:
    """What it adds to the document of the check"""
    proof, peft = found.proof, found.peft
    answers = proof.recorded if proof is not None else None
    warnings = proof.warnings if proof is not None else []
    if peft is not None and not peft.agrees:
        warnings.append(
            f"PEFT computes something else than Motet's engine: the log probability of a token differs by "
            f"{peft.largest:.3g}, and {peft.allowed:g} is allowed"
        )
    proved = proof is not None and proof.linears
    return {
        "proof": {"kernels": proof.kernels, "moved": proof.moved, "composition": proof.composition}
        if proof is not None and proved
        else None,
        "not_proved": found.not_proved,
        "peft": peft._asdict() | {"wrong": peft.wrong} if peft is not None else None,
        "not_with_peft": found.not_with_peft,
        **({"recorded_answers": answers._asdict() | {"wrong": answers.wrong}} if answers is not None else {}),
        "warnings": [*checked["warnings"], *warnings],
    }


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
            *_proof(document),
            *_answers("answers", document.get("recorded_answers"), "recorded"),
            *_answers("peft", document.get("peft"), "of PEFT"),
            *_not_done(document),
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


def _proof(document: dict[str, Any]) -> list[tuple[str, str]]:
    if not (proof := document.get("proof")):
        return []
    right = f"every linear, in the engine's memory ({document['dtype']}, {proof['kernels']})"
    acts = f"moves a logit by {proof['moved']:.2g}; other rows of a batch move it by {proof['composition']:.1e}"
    return [("right", right), ("acts", acts)]


def _answers(row: str, compared: dict[str, Any] | None, whose: str) -> list[tuple[str, str]]:
    if compared is None:
        return []
    off = f"off by {compared['largest']:.1e} at most, {compared['allowed']:g} is allowed"
    return [(row, f"{compared['answers']} {whose} ({compared['tokens']} tokens): {off}")]


def _not_done(document: dict[str, Any]) -> Iterator[tuple[str, Part]]:
    for row, reason in (("proof", "not_proved"), ("peft", "not_with_peft")):
        if why := document.get(reason):
            yield row, (f"not done: {why}", "yellow")


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
