"""`motet adapter ls` and `show`: the adapters of the running local stack, from its status and its manifests."""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import typer

from motet.digest import hex_of
from motet.domain import Digest
from motet.errors import NotFound
from motet.resources import LoRAAdapter, Manifest
from motet.sources import CLAIM
from motet_cli.adapter_check import MIB, WIDTH_OF_A_PIPE
from motet_cli.local_stack import LocalStack, running_stack
from motet_cli.printer import Part, Printer
from motet_cli.readiness import ready_of
from motet_cli.status import document_of, explanation, refusal_of
from motet_operator.local.manifest_folder import absolute_uri

Json = dict[str, Any]

LATER = "Try again in a moment; if that stays so, see `motet status`."


def ls(data_dir: Path, *, as_json: bool) -> int:
    stack = running_stack(data_dir, in_a_cluster="kubectl get lora -A")
    found = adapters_of(stack)
    if as_json:
        typer.echo(orjson.dumps({"adapters": found}, option=orjson.OPT_INDENT_2).decode())
    elif found:
        columns = ("adapter", "model", "phase", "digest", "rank", "resident", "note")
        Printer(width_of_a_pipe=WIDTH_OF_A_PIPE).table(columns, [_row(one) for one in found])
    elif stack.declared().adapters:
        typer.echo(f"Adapters are declared, but the operator says nothing of them yet. {LATER}", err=True)
    else:
        typer.echo("There are no adapters yet. Add one: motet adapter push DIR --as NAME", err=True)
    return 0


def show(data_dir: Path, name: str, *, namespace: str, as_json: bool) -> int:
    stack = running_stack(data_dir, in_a_cluster=f"kubectl describe lora {name} -n {namespace}")
    document = adapter_named(name, namespace, stack)
    if as_json:
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    else:
        print_adapter(document)
    return 0


def adapters_of(stack: LocalStack) -> list[Json]:
    """What `motet status --json` says of each, with its phase, its source and the place of its manifest."""
    declared = {one.key[1]: one for one in stack.declared().adapters}
    return [
        {**one, "phase": ready_of(one).get("reason", "")} | _declared(declared.get(f"{one['namespace']}/{one['name']}"))
        for one in document_of(stack.layout)["adapters"]
    ]


def adapter_named(name: str, namespace: str, stack: LocalStack) -> Json:
    found = {(one["namespace"], one["name"]): one for one in adapters_of(stack)}
    if (namespace, name) not in found:
        if any(one.key[1] == f"{namespace}/{name}" for one in stack.declared().adapters):
            raise NotFound(f"{namespace}/{name} is declared, but the operator says nothing of it yet. {LATER}")
        raise NotFound(f"there is no adapter {namespace}/{name} in this stack.{_nearest(name, found)}")
    return found[namespace, name]


def print_adapter(document: Json) -> None:
    printer = Printer(width_of_a_pipe=WIDTH_OF_A_PIPE)
    printer.table(("adapter", f"{document['namespace']}/{document['name']}"), _lines(document))
    if revisions := document.get("revisions"):
        printer.line()
        printer.table(("revision", "verdict", "since", "source"), [_revision(one) for one in revisions])
    printer.line()
    printer.table(
        ("condition", "status", "reason", "since", "message"),
        [
            (one["type"], one["status"], one["reason"], one["lastTransitionTime"], one["message"])
            for one in document["conditions"]
        ],
    )


def _declared(manifest: Manifest | None) -> Json:
    """Nothing, if the manifest has been removed a moment ago."""
    if manifest is None or not isinstance(manifest.resource, LoRAAdapter):
        return {"source": None, "manifest": None}
    source = manifest.resource.spec.source
    claim = source.persistent_volume_claim
    uri = f"{CLAIM.prefix}{claim.claim_name}/{claim.path}" if claim else source.address or ""
    return {
        "source": {
            "uri": uri if claim else absolute_uri(uri, manifest=manifest.place.file),
            "revision": source.revision,
            "digest": source.digest,
        },
        "manifest": str(manifest.place),
    }


def _row(one: Json) -> list[Part]:
    certificate = one["certificate"] or {}
    return [
        f"{one['namespace']}/{one['name']}",
        one["model"],
        _phase(one),
        certificate.get("shortDigest") or "-",
        str(certificate.get("rank") or "-"),
        ", ".join(_places(one)) or "-",
        "; ".join(_notes(one)) or "-",
    ]


def _lines(one: Json) -> Iterator[tuple[str, Part]]:
    yield "model", one["model"]
    yield "phase", _phase(one)
    if certificate := one["certificate"]:
        yield "digest", certificate["digest"]
        yield "rank", f"{certificate['rank']} (lora_alpha {certificate['alpha']})"
        yield "size", f"{certificate['sizeBytes'] / MIB:.1f} MiB"
        yield "linears", _some(certificate["targetModules"])
        yield "checked", f"by check {certificate['checker']}, against {certificate['baseDigest']}"
        if kernels := certificate.get("provedBy"):
            yield "proved", f"by the kernels {', '.join(kernels)}"
        if certificate.get("templateDigest"):
            yield "template", "its own"
        if answers := certificate.get("recordedAnswers"):
            yield (
                "answers",
                "as recorded in training" if answers == "Agree" else ("differ from those in training", "yellow"),
            )
    if source := one["source"]:
        yield "source", source["uri"]
        for field in ("revision", "digest"):
            if source[field]:
                yield f"source {field}", source[field]
        yield "manifest", one["manifest"]
    for place in _places(one):
        yield "resident", place
    for note in _notes(one):
        yield "note", (note, "yellow")


def _revision(one: Json) -> tuple[str, str, str, str]:
    digest = hex_of(Digest(one["digest"]))[:12] if one["digest"] else "-"
    verdict = f"{one['verdict']} ({one['reason']})" if one["reason"] else one["verdict"]
    source = f"{one['source']} at {one['revision']}" if one["revision"] else one["source"]
    return digest, verdict, one["time"], source


def _phase(one: Json) -> Part:
    return (one["phase"] or "-", "green" if one["ready"] else "red")


def _notes(one: Json) -> Iterator[str]:
    """What somebody may have to act on."""
    ready, refused = ready_of(one), refusal_of(one)
    if ready.get("status") == "True" and refused:
        yield f"the newest revision is refused: {explanation(refused)}"
    elif message := ready.get("message"):
        yield message
    yield from (one["certificate"] or {}).get("warnings", ())


def _places(one: Json) -> list[str]:
    return [f"{place['runner']} ({place['tier']})" for place in one["resident"]]


def _some(modules: list[str]) -> str:
    return f"{len(modules)}: {', '.join(sorted({path.rpartition('.')[2] for path in modules}))}"


def _nearest(name: str, known: dict[tuple[str, str], Json]) -> str:
    names = {own: f"{namespace}/{own}" for namespace, own in known}
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {names[close[0]]}?" if close else " `motet adapter ls` lists all."
