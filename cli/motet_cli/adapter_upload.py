"""`motet adapter push --to`: sends a checked adapter to a bucket or a registry, and prints the manifest that serves it
from there. What runs on this machine stays as it is."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import typer
import yaml

from motet.domain import Digest, ObjectName
from motet.errors import SetupError
from motet.read_settings import read
from motet.resources import API_VERSION, ServingPool, read_text
from motet_cli.adapter_bases import Base, base_named, base_of, pool_named
from motet_cli.adapter_check import adapter_folder_named, limits_for, print_found, verdict_document, verdict_for
from motet_cli.folders import readable
from motet_cli.local_stack import running_stack
from motet_cli.printer import Printer
from motet_cli.pushed_adapters import name_of
from motet_cli.settings import Settings
from motet_cli.upload.blobs import blobs_of
from motet_cli.upload.destinations import destination_of

DONE, REFUSED = 0, 1

WITHOUT_A_STACK = (
    "name the group of pools that serves it with --pool NAMESPACE/NAME, and the base's folder with --model."
)


def upload(
    data_dir: Path,
    folder: Path,
    *,
    name: str,
    namespace: str,
    model: str | None,
    to: str,
    pool: str | None,
    secret: str | None,
    as_json: bool,
) -> int:
    """Exit status 1: the adapter is refused. Raises SetupError if it cannot be sent."""
    folder = adapter_folder_named(folder)
    key = name_of(namespace, name, given_as="--as")
    destination = destination_of(to, read(Settings), os.environ)
    group, base = _group_and_base(pool, namespace, model, data_dir)
    limits = limits_for(base)
    with readable(folder):
        verdict = verdict_for(folder, base, limits)
    found = verdict_document(folder, base, limits, verdict)
    if not as_json:
        print_found(found, to_errors=True)
    if verdict.refusal is not None:
        if as_json:
            _print_json(found, None)
        return REFUSED
    digest = Digest(verdict.digest)
    with readable(folder):
        blobs = blobs_of(folder, digest, base.max_bytes)
        source = destination.source(blobs, digest)
        manifest = manifest_for(key, group, {**source, "digest": digest}, secret)
        sent = destination.send(blobs, digest)
    place = next(iter(source.values()))
    if as_json:
        pushed = {"namespace": key.namespace, "name": key.name, "digest": digest, "source": source, "sent": sent}
        _print_json(found, {**pushed, "manifest": manifest})
    else:
        said = f"sent to {place}: {', '.join(sent)}" if sent else f"{place} has all files already"
        Printer(to_errors=True, folds_lines=False).line(said)
        typer.echo(manifest, nl=False)
    return DONE


def manifest_for(key: ObjectName, group: ObjectName, source: Mapping[str, str], secret: str | None) -> str:
    """Raises SetupError where a manifest cannot name this source or this Secret."""
    credentials = {"credentialsSecretRef": {"name": secret}} if secret else {}
    document = {
        "apiVersion": API_VERSION,
        "kind": "LoRAAdapter",
        "metadata": {"name": key.name, "namespace": key.namespace},
        "spec": {
            "poolRef": {"name": group.name, "namespace": group.namespace},
            "source": {**source, **credentials},
        },
    }
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1000)
    for problem in read_text(text).problems:
        option = "--secret" if "credentialsSecretRef" in problem.field else "--to"
        raise SetupError(f"{option}: {problem.message}")
    return text


def _group_and_base(pool: str | None, namespace: str, model: str | None, data_dir: Path) -> tuple[ObjectName, Base]:
    if pool is not None:
        group = name_of(*ObjectName.parse(pool, default_namespace=namespace), given_as="--pool", namespace_as="--pool")
        return group, base_named(model, data_dir, dtype=None, max_lora_rank=None)
    stack = running_stack(data_dir, in_a_cluster=WITHOUT_A_STACK)
    found = pool_named(model, stack.declared())
    assert isinstance(found.resource, ServingPool)
    return found.resource.group, base_of(found, stack.max_adapter_bytes)


def _print_json(found: dict[str, Any], pushed: dict[str, Any] | None) -> None:
    typer.echo(orjson.dumps({"check": found, "pushed": pushed}, option=orjson.OPT_INDENT_2).decode())
