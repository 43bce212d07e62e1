"""`motet adapter push` and `rm`: an adapter comes to the running local stack, or goes, without a word of YAML."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import typer

from motet.clock import Clock, monotonic
from motet.domain import Digest, ObjectName
from motet.errors import AdapterError, AlreadyDeclared, SetupError
from motet.resources import LoRAAdapter, Manifest, ServingPool, read_file
from motet_cli.adapter_bases import Base, base_of, pool_named, with_problems
from motet_cli.adapter_check import adapter_folder_named, limits_for, print_found, verdict_document, verdict_for
from motet_cli.folders import readable
from motet_cli.local_stack import LocalStack, running_stack
from motet_cli.printer import Printer
from motet_cli.pushed_adapters import PushedAdapters, name_of
from motet_cli.readiness import ready_of
from motet_cli.status import document_of, explanation, refusal_of
from motet_cli.up import QUESTION, QUESTION_ANNOTATION
from motet_cli.up_output import NEEDS_KEY, example_commands, needs_key
from motet_operator.local.pauses import OF_ROUNDS

if TYPE_CHECKING:
    from motet_runner.adapters.certification import EngineLimits

Json = dict[str, Any]

DONE, FAILED = 0, 1

POLL_SECONDS = 0.1
SETTLED_SECONDS = OF_ROUNDS.max_seconds + 1
"""How long a refusal must stay to count. Until a runner has reported about the new files, and the operator's next round
has written it, a status may have the refusal of earlier ones."""

IDLE = ("Suspended", "ScaledToZero")
"""Reasons of `Ready` for an adapter that nobody wants served now."""

IN_A_CLUSTER = (
    "put the folder where the pool's runners can read it, and kubectl apply a LoRAAdapter (docs/guides/tenant.md)."
)


@dataclass(frozen=True, slots=True)
class Outcome:
    status: int
    entry: Json | None
    """What the status says of the adapter"""
    said: str = ""


def push(
    data_dir: Path,
    folder: Path,
    *,
    name: str,
    namespace: str,
    model: str | None,
    wait_seconds: float,
    as_json: bool,
    below: Path | None = None,
    new: bool = False,
) -> int:
    """Exit status 1: the adapter is refused, or not ready in time. `wait_seconds` 0: do not wait. `below`: a stranger
    has named the folder, and may read nothing outside of this one. `new`: a name that is declared is refused."""
    if below is None:
        folder = adapter_folder_named(folder)
    stack = running_stack(data_dir, in_a_cluster=IN_A_CLUSTER)
    pushed = PushedAdapters(stack)
    key = name_of(namespace, name, given_as="--as")
    pool, _ = _pool_for(key, model, stack, pushed, new=new)
    base = base_of(pool, stack.max_adapter_bytes)
    if (refused := _refused_at_sight(folder, base, pushed, below)) is not None:
        _print(refused, None, as_json=as_json)
        return FAILED
    limits = limits_for(base)
    with pushed.locked():
        pool, is_new = _pool_for(key, model, stack, pushed, new=new)
        if base_of(pool, stack.max_adapter_bytes) != base:
            raise SetupError(f"the pool of {key} has changed meanwhile. Push it again.")
        found = _checked_copy(folder, base, limits, pushed, below)
        if found["served"] is False:
            _print(found, None, as_json=as_json)
            return FAILED
        digest = Digest(found["digest"])
        before = _generation(stack, key)
        changed = pushed.declare(key, _resource(pool), digest)
        pushed.remove_unused()
    waiting = Awaited(stack, key, digest, manifest=pushed.manifest_of(key), before=before if changed else None)
    outcome = waiting.until(wait_seconds) if wait_seconds else Outcome(DONE, None, "Nothing was waited for.")
    if outcome.status == DONE and wait_seconds:
        with pushed.locked():
            pushed.remove_unused()  # the revision that served until now
    warnings = _warnings(outcome)
    document = {
        "namespace": key.namespace,
        "name": key.name,
        "digest": digest,
        "files": str(pushed.place_of(digest)),
        "manifest": str(pushed.manifest_of(key)),
        "changed": changed,
        "new": is_new,
        "ready": outcome.entry is not None and outcome.status == DONE,
        "message": outcome.said,
        "warnings": warnings,
    }
    _print(found, document, as_json=as_json)
    if not as_json:
        _print_outcome(key, outcome, pool, stack, [one for one in warnings if one not in found["warnings"]])
    return outcome.status


def rm(data_dir: Path, name: str, *, namespace: str, wait_seconds: float, as_json: bool = False) -> int:
    """Exit status 1: the stack has not noticed in time."""
    key = name_of(namespace, name, given_as="NAME")
    stack = running_stack(data_dir, in_a_cluster=f"kubectl delete lora {name} -n {namespace}")
    pushed = PushedAdapters(stack)
    with pushed.locked():
        own = pushed.withdraw(key)
    deadline = monotonic() + wait_seconds
    while _entry(stack, key) is not None and not pushed.manifest_of(key).exists():
        if monotonic() > deadline:
            said = (
                f"The manifest of {key} is removed, but the stack still has the adapter after {wait_seconds:g} s. "
                f"See the operator's log: {stack.layout.log('operator')}"
            )
            _print_removed(key, said, as_json=as_json, gone=False, failed=True)
            return FAILED
        time.sleep(POLL_SECONDS)
    with pushed.locked():
        removed = pushed.remove_unused()
        again = pushed.manifest_of(key).exists()
    files = " and its files" if own.intersection(removed) else ""
    said = f"removed {key}{files}" + ("; another command has pushed it again" if again else "")
    _print_removed(key, said, as_json=as_json, gone=not again, digests=sorted(own.intersection(removed)))
    return DONE


def _print_removed(
    key: ObjectName, said: str, *, as_json: bool, gone: bool, failed: bool = False, digests: Sequence[Digest] = ()
) -> None:
    """`gone`: the stack has no adapter of this name now; `digests`: of its files, if they were removed."""
    if not as_json:
        typer.echo(said, err=failed)
        return
    removed = {"namespace": key.namespace, "name": key.name, "gone": gone, "digests": digests, "message": said}
    typer.echo(orjson.dumps({"removed": removed}, option=orjson.OPT_INDENT_2).decode())


class Awaited:
    """Waits for what the stack says of an adapter's new files."""

    def __init__(
        self,
        stack: LocalStack,
        key: ObjectName,
        digest: Digest,
        *,
        manifest: Path,
        before: int | None,
        clock: Clock = monotonic,
    ) -> None:
        """`before`: the generation of the object in the status when the manifest was written; None: it has not
        changed, or the object is new."""
        self._stack = stack
        self._key = key
        self._digest = digest
        self._manifest = manifest
        self._before = before
        self._clock = clock
        self._refused: tuple[str, float] = ("", 0.0)
        """What a status has last said, and since when"""

    def until(self, seconds: float) -> Outcome:
        deadline = self._clock() + seconds
        while (outcome := self.look()) is None:
            if self._clock() > deadline:
                entry = _entry(self._stack, self._key)
                said = explanation(ready_of(entry)) if entry is not None else "the operator has not read its manifest"
                return Outcome(FAILED, entry, f"not ready after {seconds:g} s: {said}")
            time.sleep(POLL_SECONDS)
        return outcome

    def look(self) -> Outcome | None:
        """None: it is not decided yet."""
        document = document_of(self._stack.layout)
        entry = _entry_of(document, self._key)
        if replaced := self._replaced():
            return Outcome(FAILED, entry, replaced)
        problem = next((one for one in document["problems"] if one.startswith(f"{self._manifest}:")), "")
        if problem or entry is None:
            return self._settled(entry, problem)
        ready = ready_of(entry)
        if ready.get("reason") == "Serving" and (entry["certificate"] or {}).get("digest") == self._digest:
            return Outcome(DONE, entry)
        if ready.get("observedGeneration") == self._before:
            return None
        if ready.get("reason") in IDLE:
            return Outcome(DONE, None, explanation(ready))
        return self._settled(entry, explanation(refusal_of(entry)))

    def _replaced(self) -> str:
        """What another command has done meanwhile; empty if nothing."""
        if not self._manifest.exists():
            return "its manifest has been removed meanwhile"
        reading = read_file(self._manifest)
        declared = [
            one.resource.spec.source.digest for one in reading.manifests if isinstance(one.resource, LoRAAdapter)
        ]
        if reading.problems or self._digest in declared:
            return ""
        return "its manifest names other files now, as after another push"

    def _settled(self, entry: Json | None, now: str) -> Outcome | None:
        said, since = self._refused
        if now != said:
            self._refused = (now, self._clock())
        elif now and self._clock() - since >= SETTLED_SECONDS:
            return Outcome(FAILED, entry, now)
        return None


def _pool_for(
    key: ObjectName, model: str | None, stack: LocalStack, pushed: PushedAdapters, *, new: bool
) -> tuple[Manifest, bool]:
    """Its pool, and whether nothing declares the name yet: else it keeps its pool. Raises SetupError if the name is not
    free for a push, or `new` and declared."""
    declared = stack.declared()
    adapter = pushed.declared(key, declared)
    if adapter is None:
        return pool_named(model, declared), True
    if new:
        raise AlreadyDeclared(f"{key} is declared already. Leave --new out to give it a new revision.")
    own = next((pool for pool in declared.pools if _resource(pool).group == adapter.group), None)
    if own is None or (model is not None and _resource(pool_named(model, declared)).group != adapter.group):
        what = (
            f"{key} belongs to pool {adapter.group}, and a name keeps its pool. Remove it with `motet adapter rm "
            f"{key.name} -n {key.namespace}`, or choose another name."
        )
        raise SetupError(what if own is not None else with_problems(f"{what} There is no such pool now.", declared))
    return own, False


def _refused_at_sight(folder: Path, base: Base, pushed: PushedAdapters, below: Path | None) -> Json | None:
    """If files are missing, too large, or not to be read: what else a check needs takes seconds to import."""
    from motet_runner.adapter_inspection import AdapterVerdict

    try:
        with readable(folder):
            pushed.source(folder, below).stat_files(base.max_bytes)
    except AdapterError as refusal:
        return verdict_document(folder, base, None, AdapterVerdict(refusal=refusal))
    return None


def _checked_copy(
    folder: Path, base: Base, limits: "EngineLimits | None", pushed: PushedAdapters, below: Path | None
) -> Json:
    """The result of the check. Files that are not refused are in their place afterwards."""
    from motet_runner.adapter_inspection import AdapterVerdict

    try:
        with readable(folder), pushed.copied(folder, base.max_bytes, below) as copy:
            verdict = verdict_for(copy, base, limits)
            if verdict.refusal is None:
                pushed.keep(copy, Digest(verdict.digest))
    except AdapterError as refusal:
        verdict = AdapterVerdict(refusal=refusal)
    return verdict_document(folder, base, limits, verdict)


def _print(found: Json, pushed: Json | None, *, as_json: bool) -> None:
    if as_json:
        document = {"check": found, "pushed": pushed}
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    else:
        print_found(found)


def _warnings(outcome: Outcome) -> list[str]:
    """What a runner has found: it proves the adapter, and compares recorded answers."""
    served = outcome.status == DONE and outcome.entry is not None
    return list((outcome.entry or {})["certificate"]["warnings"]) if served else []


def _print_outcome(
    key: ObjectName, outcome: Outcome, pool: Manifest, stack: LocalStack, warnings: Sequence[str]
) -> None:
    printer = Printer(folds_lines=False)
    for warning in warnings:
        printer.line("\n", ("warning", "yellow"), f": {warning}")
    if outcome.status != DONE:
        printer.line(f"\n{key} ", ("does not serve these files", "red"), f": {outcome.said}")
        printer.line(f"motet adapter show {key.name} -n {key.namespace}   says more.")
    elif outcome.entry is None:
        printer.line(f"\n{key} is declared. {outcome.said}")
        printer.line(f"motet adapter show {key.name} -n {key.namespace}   says what became of it.")
    else:
        printer.line(f"\n{key} ", ("is served", "green"), ". Try:\n")
        question = pool.resource.metadata.annotations.get(QUESTION_ANNOTATION) or QUESTION
        status = {"adapters": [outcome.entry], "pools": []}
        for command in example_commands(document_of(stack.layout)["url"], stack.layout, status, question):
            printer.line(f"  {command}\n")
        if needs_key(stack.layout, os.environ):
            printer.line(NEEDS_KEY)


def _generation(stack: LocalStack, key: ObjectName) -> int | None:
    entry = _entry(stack, key)
    return ready_of(entry).get("observedGeneration") if entry is not None else None


def _entry(stack: LocalStack, key: ObjectName) -> Json | None:
    return _entry_of(document_of(stack.layout), key)


def _entry_of(document: Json, key: ObjectName) -> Json | None:
    return next((one for one in document["adapters"] if ObjectName(one["namespace"], one["name"]) == key), None)


def _resource(pool: Manifest) -> ServingPool:
    assert isinstance(pool.resource, ServingPool)
    return pool.resource
