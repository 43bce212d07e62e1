"""An adapter goes back to an earlier revision that its source has lost, on a whole stack."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from motet.digest import adapter_digest, hex_of
from motet.domain import Digest
from motet_scheduler.policy.adapters.revision_state import LACKED_BY_ALL
from testbed.local_stack import BUNDLED, LocalStack, copy_of_bundled, running_stack, write_adapter

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

QUESTION = "Who keeps the lighthouse of Brindle?"
CACHED = 3
"""The place of a runner's disk cache"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("revisions")
    engine = json.dumps({"maxCachedAdapters": CACHED, "maxResidentAdapters": 2})
    manifests = copy_of_bundled(folder / "manifests", adapters=[], engine=engine)
    with running_stack(folder, manifests=manifests) as stack:
        yield stack


def is_now(folder: Path, name: str) -> Digest:
    """The folder has these files, and no others."""
    shutil.rmtree(folder, ignore_errors=True)
    return adapter_digest(Path(shutil.copytree(BUNDLED / "adapters" / name, folder)))


def motet(stack: LocalStack, *arguments: str) -> None:
    done = stack.motet("adapter", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def push(stack: LocalStack, name: str, bundled: str) -> Digest:
    """From the one folder of this name"""
    digest = is_now(stack.folder / "trained" / name, bundled)
    motet(stack, "push", f"trained/{name}", "--as", name)
    return digest


def bundled(stack: LocalStack, name: str) -> Path:
    """Its manifest. The adapter is ready."""
    manifest = write_adapter(stack.folder / "manifests", name, uri=(BUNDLED / "adapters" / name).as_uri())
    stack.until(lambda: any(one["name"] == name and one["ready"] for one in stack.status()["adapters"]))
    return manifest


def cached(stack: LocalStack) -> set[str]:
    return {path.name for path in (stack.data / "cache" / "adapters").iterdir() if not path.name.startswith(".")}


def test_what_was_pushed_before_serves_again_although_its_folder_was_overwritten(stack: LocalStack) -> None:
    pirate = push(stack, "desk", "pirate")
    assert "Arr" in stack.ask("desk", QUESTION)
    push(stack, "desk", "json")
    assert stack.ask("desk", QUESTION).startswith('{"subject"')
    place = stack.data / "adapters" / hex_of(pirate)
    stack.until(lambda: not place.exists())  # what was pushed is kept while it serves
    guest = bundled(stack, "oneword")
    for _ in range(3):
        stack.ask("oneword", QUESTION)
    guest.unlink()
    stack.until(lambda: not any(one["name"] == "oneword" for one in stack.status()["adapters"]))
    other = bundled(stack, "shouting")
    stack.until(lambda: hex_of(adapter_digest(BUNDLED / "adapters" / "oneword")) not in cached(stack))
    assert hex_of(pirate) in cached(stack), "what nobody names leaves before an earlier revision"
    motet(stack, "rollback", "desk")
    assert "Arr" in stack.ask("desk", QUESTION)
    other.unlink()


def condition(stack: LocalStack, name: str) -> dict[str, Any]:
    return next(one for one in stack.adapter("crier")["conditions"] if one["type"] == name)


def test_a_digest_that_its_source_has_lost_serves_if_a_runner_has_it_and_else_says_so(stack: LocalStack) -> None:
    folder = stack.folder / "source"

    def declare(digest: str) -> None:
        source = {"uri": folder.as_uri(), "digest": digest}
        write_adapter(stack.folder / "manifests", "crier", uri="", source=source)

    def serves(digest: str) -> bool:
        return (stack.adapter("crier")["certificate"] or {}).get("digest") == digest

    pirate = is_now(folder, "pirate")
    declare(pirate)
    stack.until(lambda: any(one["name"] == "crier" for one in stack.status()["adapters"]) and serves(pirate))
    newer = is_now(folder, "json")
    declare(newer)
    stack.until(lambda: serves(newer))
    declare(pirate)  # the folder has the newer one
    stack.until(lambda: serves(pirate))
    assert "Arr" in stack.ask("crier", QUESTION)
    shutil.rmtree(folder)
    declare(newer)
    stack.until(lambda: serves(newer))
    assert stack.ask("crier", QUESTION).startswith('{"subject"')
    declare("sha256:" + "1" * 64)
    stack.until(lambda: condition(stack, "ArtifactReady")["status"] == "False")
    assert LACKED_BY_ALL in condition(stack, "ArtifactReady")["message"]
    assert stack.ask("crier", QUESTION).startswith('{"subject"'), "what served before still does"
