"""`motet adapter rollback`: an earlier revision of an adapter serves again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from motet.digest import adapter_digest, hex_of, is_digest
from motet.domain import Digest
from motet.errors import SetupError
from motet.sources import folder_of
from motet_cli.adapter_commands import adapter_named
from motet_cli.adapter_push import push
from motet_cli.local_stack import LocalStack, running_stack
from motet_cli.pushed_adapters import PushedAdapters, name_of

Json = dict[str, Any]

MIN_DIGITS = 6
"""The fewest hex digits that may stand for a digest."""


def rollback(data_dir: Path, name: str, *, namespace: str, to: str | None, wait_seconds: float, as_json: bool) -> int:
    """Exit status 1: the revision is refused, or not ready in time. `wait_seconds` 0: do not wait."""
    key = name_of(namespace, name, given_as="NAME")
    stack = running_stack(data_dir, in_a_cluster=_in_a_cluster(name, namespace, to))
    entry = adapter_named(name, namespace, stack)
    revisions = entry.get("revisions", [])
    pushed = PushedAdapters(stack)
    wanted = _named(to, revisions) if to else _before(revisions, pushed.named_by(key))
    if wanted is None:
        raise SetupError(
            f"{key} has no earlier revision that has served. `motet adapter show {name} -n {namespace}` lists the last "
            "ones."
        )
    if not (path := pushed.manifest_of(key)).exists():
        place = entry["manifest"]
        if place is None or place.startswith(f"{path}:"):
            raise SetupError(
                f"the manifest of {key} has just been removed. Push an adapter: motet adapter push DIR --as {name} "
                f"-n {namespace}"
            )
        revision = f", revision: {json.dumps(wanted['revision'])}" if wanted["revision"] else ""
        raise SetupError(
            f"{key} is declared at {place}, which `motet adapter push` has not written. Write there: "
            f"source: {{uri: {json.dumps(wanted['source'])}{revision}, digest: {wanted['digest']}}}\n"
            "A runner that still has these files does not ask the source for them."
        )
    return push(
        data_dir,
        _folder_with(wanted, stack),
        name=name,
        namespace=namespace,
        model=None,
        wait_seconds=wait_seconds,
        as_json=as_json,
    )


def _before(revisions: list[Json], declared: set[Digest]) -> Json | None:
    """The last one that has served and is not declared now. If `declared` is empty, the newest one is declared."""
    now = declared or {one["digest"] for one in revisions[:1]}
    served = (one for one in revisions if one["verdict"] in ("Serving", "Draining", "Replaced"))
    return next((one for one in served if one["digest"] and one["digest"] not in now), None)


def _named(to: str, revisions: list[Json]) -> Json:
    digits = to.removeprefix("sha256:")
    if len(digits) < MIN_DIGITS:
        raise SetupError(f"--to: write at least {MIN_DIGITS} digits of a digest.")
    found = [one for one in revisions if one["digest"] and hex_of(Digest(one["digest"])).startswith(digits)]
    if not found:
        known = ", ".join(hex_of(Digest(one["digest"]))[:12] for one in revisions if one["digest"])
        raise SetupError(f"--to: none of the last revisions has the digest {to}. These are known: {known or 'none'}.")
    if len({one["digest"] for one in found}) > 1:
        raise SetupError(f"--to: {to} stands for several digests. Write more of it.")
    return found[0]


def _folder_with(wanted: Json, stack: LocalStack) -> Path:
    """A folder of this machine that has these files: what was pushed, a runner's cache, or where they came from."""
    digest = Digest(wanted["digest"])
    for folder in _folders(wanted, stack):
        try:
            if adapter_digest(folder) == digest:
                return folder
        except OSError:
            continue  # there is nothing, or nothing whole
    source = wanted["source"]
    looked = f"neither at {source} nor" if folder_of(source) is not None else "not"
    more = "" if folder_of(source) is not None else f" {source}, where they came from, was not asked."
    raise SetupError(
        f"The files of {digest} are {looked} in a cache of this machine.{more} Push them again: "
        "motet adapter push DIR --as NAME"
    )


def _folders(wanted: Json, stack: LocalStack) -> Iterator[Path]:
    name = hex_of(Digest(wanted["digest"]))
    yield stack.layout.data / "adapters" / name
    yield stack.layout.data / "cache" / "adapters" / name
    if (source := folder_of(wanted["source"])) is not None:
        yield source


def _in_a_cluster(name: str, namespace: str, to: str | None) -> str:
    return (
        f"kubectl get lora {name} -n {namespace} "
        """-o jsonpath='{range .status.revisions[*]}{.time} {.verdict} {.digest} {.source} {.revision}{"\\n"}{end}'\n"""
        f"kubectl patch lora {name} -n {namespace} --type merge "
        f"""-p '{{"spec": {{"source": {{"digest": "{to if to and is_digest(to) else "DIGEST"}"}}}}}}'\n"""
        "If spec.source names another place since, set that back, too. A runner that still has the files does not ask "
        "the source for them, whatever revision and Secret it names now."
    )
