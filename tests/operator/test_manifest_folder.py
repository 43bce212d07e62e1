"""The folder as objects: what was right stays until something right replaces it."""

import os
from pathlib import Path

import pytest

from motet.resources import names_manifest
from motet.resources.validation import read_file
from motet.sources import folder_of
from motet_operator.local import manifest_folder
from motet_operator.local.manifest_folder import MISSING, Debouncer, ManifestFolder, absolute_uri, stamp_of
from motet_operator.local.object_metadata import MetadataFile

ADAPTER = """\
apiVersion: motet.dev/v1alpha1
kind: LoRAAdapter
metadata: {name: %s}
spec:
  poolRef: {name: demo}
  source: {uri: "file://adapters/%s"}
"""


def write(folder: Path, name: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(ADAPTER % (name, name), errors="replace")
    return path


def names(folder: ManifestFolder) -> list[str]:
    return [manifest.resource.metadata.name for manifest in folder.read().adapters]


def test_files_come_and_go(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path, tmp_path / "kept")
    assert names(folder) == []
    write(tmp_path, "a")
    path = write(tmp_path, "b")
    assert names(folder) == ["a", "b"]
    path.unlink()
    assert names(folder) == ["a"]


def test_only_files_that_have_changed_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: one change in a folder of thousands has all of them parsed."""
    read: list[str] = []
    monkeypatch.setattr(manifest_folder, "read_file", lambda path: (read.append(path.name), read_file(path))[1])
    folder = ManifestFolder(tmp_path, tmp_path / "kept")
    paths = [write(tmp_path, name) for name in "abc"]
    paths[2].write_text("kind: [")

    def look() -> list[str]:
        read.clear()
        folder.read()
        return sorted(read)

    monkeypatch.setattr(manifest_folder, "NEW_NS", 3600 * 10**9)
    assert look() == look() == ["a.yaml", "b.yaml", "c.yaml"]
    monkeypatch.setattr(manifest_folder, "NEW_NS", 0)
    assert look() == ["a.yaml", "b.yaml", "c.yaml"]
    assert look() == ["c.yaml"]  # its problems are said again
    write(tmp_path, "d")
    text = paths[0].read_text()
    paths[0].write_text(text.replace("adapters/a", "adapters/z"))
    os.utime(paths[0], (1, 1))
    assert look() == ["a.yaml", "c.yaml", "d.yaml"]
    assert names(folder) == ["a", "b", "d"]
    assert "adapters/z" in str(folder.read().adapters[0].resource)
    paths[1].unlink()
    assert names(folder) == ["a", "d"]
    folder.recall()
    assert look() == ["a.yaml", "c.yaml", "d.yaml"]


def test_a_file_that_becomes_invalid_keeps_its_last_valid_objects(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path, tmp_path / "kept")
    path = write(tmp_path, "a")
    folder.read()
    path.write_text("kind: [")
    objects = folder.read()
    assert [manifest.resource.metadata.name for manifest in objects.adapters] == ["a"]
    assert "is not YAML" in str(objects.problems[0])
    write(tmp_path, "a")
    assert folder.read().problems == ()


def test_the_next_operator_goes_on_from_what_was_accepted(tmp_path: Path) -> None:
    kept, manifests = tmp_path / "kept", tmp_path / "manifests"
    manifests.mkdir()
    first = ManifestFolder(manifests, kept)
    broken, changed = write(manifests, "a"), write(manifests, "b")
    (manifests / "others.yaml").write_text(
        "apiVersion: v1\nkind: Secret\nmetadata: {name: key}\nstringData: {token: hush}\n---\n"
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: acme, labels: {team: law}}\n"
    )
    before = first.read()
    assert "hush" not in kept.read_text()
    broken.write_text("kind: [")
    changed.write_text(changed.read_text().replace("name: demo", "name: other"))
    running = first.read()
    again = ManifestFolder(manifests, kept)
    again.recall()
    objects = again.read()
    assert [str(problem) for problem in objects.problems] == [str(problem) for problem in running.problems]
    assert objects.namespaces == before.namespaces
    assert [one.resource for one in objects.adapters] == [one.resource for one in before.adapters]
    assert [one.place_of(("spec",)) for one in objects.adapters] == [one.place for one in before.adapters]
    elsewhere = ManifestFolder(tmp_path, kept)
    elsewhere.recall()
    assert elsewhere.read().adapters == ()


def test_an_immutable_field_keeps_its_value_and_is_reported(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path, tmp_path / "kept")
    path = write(tmp_path, "a")
    folder.read()
    path.write_text(path.read_text().replace("name: demo", "name: other"))
    objects = folder.read()
    assert objects.adapters[0].resource.spec.pool_ref.name == "demo"  # type: ignore[union-attr]
    assert str(objects.problems[0]) == (f"{path}:5:3: LoRAAdapter default/a: spec.poolRef: poolRef is immutable")


def test_the_first_of_two_equal_names_stays(tmp_path: Path) -> None:
    write(tmp_path, "a")
    (tmp_path / "b.yaml").write_text(ADAPTER % ("a", "other"))
    objects = ManifestFolder(tmp_path, tmp_path / "kept").read()
    assert [manifest.place.file for manifest in objects.adapters] == [f"{tmp_path}/a.yaml"]
    assert "is declared twice" in str(objects.problems[0])


def test_a_missing_folder_removes_no_object(tmp_path: Path) -> None:
    place = tmp_path / "m"
    place.mkdir()
    write(place, "a")
    folder = ManifestFolder(place, tmp_path / "kept")
    folder.read()
    place.rename(tmp_path / "elsewhere")
    objects = folder.read()
    assert len(objects.adapters) == 1
    assert "cannot be read: No such file or directory" in str(objects.problems[0])


def test_a_file_whose_name_is_not_utf8_is_a_problem(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path, tmp_path / "kept")
    write(tmp_path, "a")
    write(tmp_path, os.fsdecode(b"caf\xe9"))
    objects = folder.read()
    assert [manifest.resource.metadata.name for manifest in objects.adapters] == ["a"]
    (problem,) = objects.problems
    assert str(problem) == f"{tmp_path}/caf\\udce9.yaml:1:1: has a name that is not UTF-8; rename it"


@pytest.mark.parametrize(
    ("uri", "absolute"),
    [
        ("file://model", "file:///m/model"),
        ("file://./model", "file:///m/model"),
        ("file:///models/base", "file:///models/base"),
        ("file://my model", "file:///m/my%20model"),
        ("file://modèle", "file:///m/mod%C3%A8le"),
    ],
)
def test_a_relative_uri_counts_from_the_manifest(uri: str, absolute: str) -> None:
    assert absolute_uri(uri, manifest="/m/pool.yaml") == absolute
    assert folder_of(absolute) == Path("/m", uri.removeprefix("file://"))


def test_a_stamp_changes_with_any_file(tmp_path: Path) -> None:
    assert stamp_of(tmp_path / "none") == MISSING
    seen = {stamp_of(tmp_path)}
    weights = tmp_path / "weights"
    weights.write_text("a")
    seen.add(stamp_of(tmp_path))
    assert stamp_of(tmp_path) in seen
    os.utime(weights, ns=(1, 1))
    seen.add(stamp_of(tmp_path))
    other = tmp_path / "copy"
    other.write_text("a")
    os.utime(other, ns=(1, 1))
    other.rename(weights)  # the same name, size and time, and yet another file
    seen.add(stamp_of(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    seen.add(stamp_of(tmp_path))
    assert len(seen) == 5


def test_a_changed_value_passes_once_it_stays_the_same() -> None:
    debounced = Debouncer(0.3)
    assert debounced("a", "1", 0.0) == "1"
    assert debounced("a", "2", 1.0) == "1"
    assert debounced.next_look(9.0) == pytest.approx(0.1)
    assert debounced("a", "3", 1.2) == "1"
    assert debounced("a", "3", 1.4) == "1"
    assert debounced("a", "3", 1.6) == "3"
    assert debounced.next_look(9.0) == 9.0
    assert debounced("a", "4", 2.0) == "3"
    assert debounced("a", "3", 2.1) == "3", "it came back to what it was"
    assert debounced.next_look(9.0) == 9.0
    debounced.forget({"b"})
    assert debounced("a", "9", 3.0) == "9"


def test_a_value_that_changes_all_the_time_passes_after_a_long_time() -> None:
    debounced = Debouncer(0.3)
    seen = {debounced("a", str(tenth), tenth / 10) for tenth in range(700)}
    assert sorted(map(int, seen)) == [0, 301, 602], "each 30 s after the first change that had not passed"


def test_what_grows_beside_the_manifests_is_not_in_their_stamp(tmp_path: Path) -> None:
    write(tmp_path, "a")
    stamp = stamp_of(tmp_path, names_manifest)
    for other in ("train.log", ".a.yaml.swp", ".hidden.yaml"):
        (tmp_path / other).write_text("more")
    assert stamp_of(tmp_path, names_manifest) == stamp
    write(tmp_path, "b")
    assert stamp_of(tmp_path, names_manifest) != stamp


def test_generations_count_changes_and_survive_a_restart(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path, tmp_path / "kept")
    write(tmp_path, "a")
    path = write(tmp_path, "b")
    memory = tmp_path / "memory"
    first = MetadataFile(memory).remember(list(folder.read().adapters))
    assert [(one.generation, one.age) for one in first.values()] == [(1, 1), (1, 2)]
    path.write_text(path.read_text() + "  suspend: true\n")
    second = MetadataFile(memory).remember(list(folder.read().adapters))
    assert [(one.generation, one.age) for one in second.values()] == [(1, 1), (2, 2)]
    path.unlink()
    MetadataFile(memory).remember(list(folder.read().adapters))
    write(tmp_path, "b")
    third = MetadataFile(memory).remember(list(folder.read().adapters))
    assert [(one.generation, one.age) for one in third.values()] == [(1, 1), (1, 3)], "a new object is the youngest"
