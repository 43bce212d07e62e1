"""`motet adapter rollback`: which revision it finds, and where from. `tests/stack/test_pages.py` types it on a whole
stack."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from motet.digest import adapter_digest, hex_of
from motet.errors import SetupError
from motet_cli import adapter_push, adapter_rollback
from tests.cli.standing_stack import StandingStack, adapter_entry, standing_stack
from tests.cli.test_adapter_push import PIRATE, SERVES, declared, of_another_seed
from tests.support.forked_motet import motet

pytestmark = pytest.mark.usefixtures("kept_checks")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[StandingStack]:
    with standing_stack(tmp_path) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("structlog.configure", lambda **_: None)  # that of this process


def push(stack: StandingStack, folder: Path, name: str = "desk") -> None:
    how: dict[str, Any] = {"namespace": "default", "model": None, "wait_seconds": 0.0, "as_json": False}
    assert adapter_push.push(stack.data, folder, name=name, **how) == 0


def rollback(stack: StandingStack, name: str = "desk", to: str | None = None) -> int:
    return adapter_rollback.rollback(stack.data, name, namespace="default", to=to, wait_seconds=0.0, as_json=False)


def revision(folder: Path | str | None, verdict: str, source: str = "https://gone.example/a/") -> dict[str, Any]:
    digest = adapter_digest(folder) if isinstance(folder, Path) else folder
    return {
        "source": source, "revision": None, "digest": digest, "verdict": verdict, "reason": None,
        "time": "2026-01-02T03:04:05Z",
    }  # fmt: skip


def says(stack: StandingStack, *revisions: dict[str, Any], name: str = "desk", digest: str) -> None:
    stack.says(adapter_entry(name, digest=digest, Ready=SERVES) | {"revisions": list(revisions)})


def two_pushed(stack: StandingStack, tmp_path: Path) -> Path:
    """The newer one serves, and the files of the other one are only in the runners' cache."""
    newer = of_another_seed(PIRATE, tmp_path / "newer")
    push(stack, PIRATE)
    push(stack, newer)
    cached = stack.data / "cache" / "adapters" / hex_of(adapter_digest(PIRATE))
    shutil.copytree(PIRATE, cached)
    (cached / "certificate.json").write_text("{}")
    shutil.rmtree(stack.data / "adapters" / cached.name, ignore_errors=True)
    return newer


def test_the_revision_before_serves_again_from_the_runners_cache_although_its_source_has_lost_it(
    stack: StandingStack, tmp_path: Path
) -> None:
    newer = two_pushed(stack, tmp_path)
    says(stack, revision(newer, "Serving"), revision(PIRATE, "Replaced"), digest=adapter_digest(newer))
    assert rollback(stack) == 0
    found = declared(stack).spec.source
    place = stack.data / "adapters" / hex_of(adapter_digest(PIRATE))
    assert (found.digest, found.uri) == (adapter_digest(PIRATE), place.as_uri())
    assert adapter_digest(place) == adapter_digest(PIRATE)


def test_one_of_the_last_revisions_may_be_named_by_its_first_digits(stack: StandingStack, tmp_path: Path) -> None:
    newer = two_pushed(stack, tmp_path)
    others = [revision("sha256:" + "1" * 64, "Replaced"), revision(None, "Refused")]
    says(stack, revision(newer, "Serving"), *others, revision(PIRATE, "Replaced"), digest=adapter_digest(newer))
    assert rollback(stack, to=hex_of(adapter_digest(PIRATE))[:8]) == 0
    assert declared(stack).spec.source.digest == adapter_digest(PIRATE)
    with pytest.raises(SetupError, match=r"none of the last revisions has the digest abcdef01.*111111111111"):
        rollback(stack, to="abcdef01")
    with pytest.raises(SetupError, match="at least 6 digits"):
        rollback(stack, to="ab")


def test_files_that_have_changed_or_gone_are_not_served_as_the_earlier_revision(
    stack: StandingStack, tmp_path: Path
) -> None:
    newer = two_pushed(stack, tmp_path)
    cached = stack.data / "cache" / "adapters" / hex_of(adapter_digest(PIRATE))
    (cached / "adapter_config.json").write_text("{}")
    says(stack, revision(newer, "Serving"), revision(PIRATE, "Replaced"), digest=adapter_digest(newer))
    with pytest.raises(SetupError, match=r"not in a cache of this machine\. https://gone\.example/a/.* was not asked"):
        rollback(stack)
    gone = revision(PIRATE, "Replaced", source="file:///gone")
    says(stack, revision(newer, "Serving"), gone, digest=adapter_digest(newer))
    with pytest.raises(SetupError, match="neither at file:///gone nor in a cache"):
        rollback(stack)
    assert declared(stack).spec.source.digest == adapter_digest(newer)
    source = shutil.copytree(PIRATE, tmp_path / "source")
    before = revision(PIRATE, "Draining", source=Path(source).as_uri())
    says(stack, revision(newer, "Serving"), before, digest=adapter_digest(newer))
    assert rollback(stack) == 0


@pytest.mark.parametrize("verdict", ["Checking", "Refused"])
def test_while_the_newest_does_not_serve_the_one_that_serves_is_declared_again(
    stack: StandingStack, tmp_path: Path, verdict: str
) -> None:
    newer = two_pushed(stack, tmp_path)
    older = revision("sha256:" + "1" * 64, "Replaced")
    says(stack, revision(newer, verdict), revision(PIRATE, "Serving"), older, digest=adapter_digest(PIRATE))
    assert rollback(stack) == 0
    assert declared(stack).spec.source.digest == adapter_digest(PIRATE)


def test_after_a_refused_revision_was_taken_back_the_one_before_serves_again(
    stack: StandingStack, tmp_path: Path
) -> None:
    newer = two_pushed(stack, tmp_path)
    refused = revision("sha256:" + "1" * 64, "Refused")
    says(stack, refused, revision(newer, "Serving"), revision(PIRATE, "Replaced"), digest=adapter_digest(newer))
    assert rollback(stack) == 0
    assert declared(stack).spec.source.digest == adapter_digest(PIRATE)


def test_without_an_earlier_revision_nothing_changes(stack: StandingStack) -> None:
    push(stack, PIRATE)
    for revisions in ([], [revision(PIRATE, "Serving")], [revision(PIRATE, "Serving"), revision(None, "Refused")]):
        says(stack, *revisions, digest=adapter_digest(PIRATE))
        with pytest.raises(SetupError, match="has no earlier revision that has served"):
            rollback(stack)


def test_of_a_manifest_that_no_push_has_written_it_says_what_to_write(stack: StandingStack) -> None:
    older = "sha256:" + "1" * 64
    says(stack, revision(PIRATE, "Serving"), revision(older, "Replaced"), name="pirate", digest=adapter_digest(PIRATE))
    with pytest.raises(SetupError) as caught:
        rollback(stack, "pirate")
    assert "which `motet adapter push` has not written" in str(caught.value)
    assert f'source: {{uri: "https://gone.example/a/", digest: {older}}}' in str(caught.value)


def test_a_manifest_that_has_just_gone_is_nobody_elses(stack: StandingStack, monkeypatch: pytest.MonkeyPatch) -> None:
    older, exists = "sha256:" + "1" * 64, Path.exists
    push(stack, PIRATE)
    says(stack, revision(PIRATE, "Serving"), revision(older, "Replaced"), digest=adapter_digest(PIRATE))
    goes = stack.manifests / "default.desk.pushed.yaml"
    with monkeypatch.context() as patch, pytest.raises(SetupError, match="has just been removed"):
        patch.setattr(Path, "exists", lambda path: path != goes and exists(path))  # after it was read
        rollback(stack)
    goes.unlink()
    with pytest.raises(SetupError, match="the manifest of default/desk has just been removed"):
        rollback(stack)


def test_without_a_stack_it_says_what_a_cluster_needs(tmp_path: Path) -> None:
    done = motet("adapter", "rollback", "desk", "-n", "acme", "--to", "sha256:1", "--data-dir", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "kubectl get lora desk -n acme -o jsonpath=" in done.stderr
    assert "{.digest} {.source} {.revision}" in done.stderr
    assert """-p '{"spec": {"source": {"digest": "DIGEST"}}}'""" in done.stderr, "the API server takes no beginning"
    whole = "sha256:" + "1" * 64
    done = motet("adapter", "rollback", "desk", "-n", "acme", "--to", whole, "--data-dir", str(tmp_path))
    assert f"""-p '{{"spec": {{"source": {{"digest": "{whole}"}}}}}}'""" in done.stderr
