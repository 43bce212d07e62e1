"""`motet adapter push` and `rm`: files and manifests, and how long a push waits. `tests/stack/test_pages.py` types both
on a whole stack."""

import errno
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from motet.digest import adapter_digest, hex_of
from motet.domain import Digest, ObjectName
from motet.errors import AlreadyDeclared, NotFound, SetupError, StateDirectoryError
from motet.keys import KEYS_MADE_FILE
from motet.resources import LoRAAdapter, files_of, read_all
from motet.sources import folder_of
from motet_cli import adapter_push, pushed_adapters
from motet_cli.adapter_bases import Base
from motet_cli.adapter_push import Awaited, Outcome
from motet_cli.local_stack import LocalStack, running_stack
from motet_cli.pushed_adapters import PushedAdapters
from motet_operator.local.manifest_folder import absolute_uri
from testbed import local_stack
from testbed.local_stack import BUNDLED, write_adapter
from tests.cli.standing_stack import DIGEST, StandingStack, adapter_entry, standing_stack
from tests.support.forked_motet import motet

PIRATE, STORYTELLER = BUNDLED / "adapters" / "pirate", BUNDLED / "adapters" / "storyteller"
pytestmark = pytest.mark.usefixtures("kept_checks")
SERVES = ("True", "Serving", "")
REFUSED = ("False", "ShapeMismatch", "wrong shapes")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[StandingStack]:
    with standing_stack(tmp_path) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("structlog.configure", lambda **_: None)  # that of this process


def push(stack: StandingStack, folder: Path, name: str = "desk", **more: Any) -> int:
    asked = {"namespace": "default", "model": None, "wait_seconds": 0.0, "as_json": False} | more
    return adapter_push.push(stack.data, folder, name=name, **asked)


def rm(stack: StandingStack, name: str = "desk", **more: Any) -> int:
    return adapter_push.rm(stack.data, name, **{"namespace": "default", "wait_seconds": 5.0} | more)


def kept(stack: StandingStack) -> list[str]:
    """The adapters whose files are there, and everything that should not be."""
    return sorted(path.name for path in (stack.data / "adapters").iterdir() if not path.name.endswith(".manifests"))


def place_of(folder: Path) -> str:
    return hex_of(adapter_digest(folder))


def declared(stack: StandingStack, name: str = "default/desk") -> LoRAAdapter:
    reading = read_all(files_of(stack.manifests))
    assert not reading.problems
    (found,) = [one.resource for one in reading.manifests if one.key == ("LoRAAdapter", name)]
    assert isinstance(found, LoRAAdapter)
    return found


def of_another_seed(adapter: Path, target: Path) -> Path:
    """Equal but for the scale: another revision."""
    shutil.copytree(adapter, target)
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 17}))
    return target


# ---------------------------------------------------------------------------------------------- what may not be read


@pytest.mark.parametrize("linked", ["folder", "file", "none"])
def test_nothing_outside_of_a_given_root_is_read(
    stack: StandingStack, tmp_path: Path, capsys: pytest.CaptureFixture[str], linked: str
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    if linked == "folder":
        (root / "a").symlink_to(PIRATE)
    elif linked == "file":
        shutil.copytree(PIRATE, root / "a")
        (root / "a" / "adapter_model.safetensors").unlink()
        (root / "a" / "adapter_model.safetensors").symlink_to(PIRATE / "adapter_model.safetensors")
    assert push(stack, root / "a", below=root, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["pushed"], found["check"]["served"]) == (None, False)
    words = "There is no folder" if linked == "none" else f"is a link that leads out of {root}"
    assert words in found["check"]["message"]
    assert not list(stack.manifests.glob("*.pushed.yaml"))


def test_what_lies_below_the_root_is_pushed_also_through_links(stack: StandingStack, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(PIRATE, root / "a")
    (root / "b").symlink_to(root / "a")
    (tmp_path / "alias").symlink_to(root)
    assert push(stack, root / "b", below=root) == 0
    assert push(stack, tmp_path / "alias" / "b", "chair", below=tmp_path / "alias") == 0


def test_files_that_are_missing_are_refused_before_torch_is_imported(
    stack: StandingStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(adapter_push, "limits_for", None)
    assert push(stack, tmp_path / "empty") == 1


# ------------------------------------------------------------------------------------------------ files and manifests


def test_a_push_copies_the_files_by_their_digest_and_declares_them(
    stack: StandingStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = Path(shutil.copytree(PIRATE, tmp_path / "trained"))
    (trained / "optimizer.pt").write_bytes(b"not for a runner")
    assert push(stack, trained) == 0
    place = stack.data / "adapters" / place_of(PIRATE)
    assert kept(stack) == [".lock", place.name]
    assert sorted(path.name for path in place.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert adapter_digest(place) == adapter_digest(PIRATE)
    found = declared(stack)
    assert (found.spec.source.uri, found.spec.source.digest) == (place.as_uri(), adapter_digest(PIRATE))
    assert str(found.group) == "default/demo"
    said = capsys.readouterr().out
    assert "served on " in said
    assert "default/desk is declared. Nothing was waited for.\nmotet adapter show desk -n default   says" in said


def test_a_second_push_switches_the_revision_and_keeps_what_somebody_has_added(
    stack: StandingStack, tmp_path: Path
) -> None:
    assert push(stack, PIRATE) == 0
    path = stack.manifests / "default.desk.pushed.yaml"
    document = yaml.safe_load(path.read_text())
    document["spec"]["priority"] = "Batch"
    path.write_text(yaml.safe_dump(document))
    newer = of_another_seed(PIRATE, tmp_path / "newer")
    stack.says(adapter_entry("desk", digest=adapter_digest(newer), Ready=SERVES))
    assert push(stack, newer, wait_seconds=20.0) == 0
    found = declared(stack)
    assert (found.spec.source.digest, found.spec.priority) == (adapter_digest(newer), "Batch")
    assert kept(stack) == [".lock", place_of(newer)], "the files of the earlier revision go once the new one serves"
    assert path.read_text().startswith("# `motet adapter push` has written this file")


def test_what_a_runner_warns_about_is_said_once(stack: StandingStack, capsys: pytest.CaptureFixture[str]) -> None:
    found = "the answers recorded in motet_proof.json are not those of this base model"
    stack.says(adapter_entry("desk", digest=adapter_digest(PIRATE), warnings=(found,), Ready=SERVES))
    assert push(stack, PIRATE, wait_seconds=20.0) == 0
    assert capsys.readouterr().out.count(f"warning: {found}") == 1
    assert push(stack, PIRATE, wait_seconds=20.0, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["pushed"]["warnings"] == [found]
    stack.says()
    assert push(stack, PIRATE, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["pushed"]["warnings"] == []


def test_equal_files_of_two_names_are_one_copy_until_both_are_gone(
    stack: StandingStack, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("desk", "chair"):
        assert push(stack, PIRATE, name) == 0
    assert kept(stack) == [".lock", place_of(PIRATE)]
    assert rm(stack) == 0
    assert kept(stack) == [".lock", place_of(PIRATE)]
    assert capsys.readouterr().out.endswith("removed default/desk\n")
    assert rm(stack, "chair") == 0
    assert kept(stack) == [".lock"]
    assert not list((stack.data / "adapters").glob("*.manifests"))
    assert capsys.readouterr().out == "removed default/chair and its files\n"
    assert not list(stack.manifests.glob("*.pushed.yaml"))


def test_files_that_a_manifest_of_another_folder_names_stay(tmp_path: Path) -> None:
    """`motet up` may watch another folder next time, with the same state directory."""
    with standing_stack(tmp_path) as first:
        assert push(first, PIRATE) == 0
    shutil.move(tmp_path / "manifests", tmp_path / "first")
    with standing_stack(tmp_path) as second:
        record = next((second.data / "adapters").glob("*.manifests"))
        record.write_text(str(tmp_path / "first" / "default.desk.pushed.yaml") + "\n")
        assert push(second, PIRATE, "chair") == 0
        assert rm(second, "chair") == 0
        assert kept(second) == [".lock", place_of(PIRATE)]


def test_files_whose_manifest_is_in_a_folder_that_is_away_stay(stack: StandingStack) -> None:
    assert push(stack, PIRATE) == 0
    record = next((stack.data / "adapters").glob("*.manifests"))
    record.write_text("/away/default.desk.pushed.yaml\n")
    assert rm(stack) == 0
    assert kept(stack) == [".lock", place_of(PIRATE)]


def test_files_that_the_operator_has_accepted_stay_while_their_manifest_has_a_problem(stack: StandingStack) -> None:
    assert push(stack, PIRATE) == 0
    assert push(stack, STORYTELLER, "chair") == 0
    stack.reads_manifests()
    (stack.manifests / "default.desk.pushed.yaml").write_text("kind: [")
    assert rm(stack, "chair") == 0
    assert kept(stack) == [".lock", *sorted(map(place_of, (PIRATE, STORYTELLER)))]
    stack.reads_manifests()
    assert push(stack, STORYTELLER, "chair") == 0
    assert rm(stack, "chair") == 0
    assert kept(stack) == [".lock", place_of(PIRATE)]


def test_a_push_without_waiting_removes_revisions_older_than_the_one_that_serves(
    stack: StandingStack, tmp_path: Path
) -> None:
    revisions = [PIRATE, STORYTELLER, of_another_seed(PIRATE, tmp_path / "newer")]
    for revision in revisions[:2]:
        assert push(stack, revision) == 0
        stack.reads_manifests()
        stack.says(adapter_entry("desk", digest=adapter_digest(revision), Ready=SERVES))
    assert push(stack, revisions[2]) == 0
    assert kept(stack) == [".lock", *sorted(place_of(one) for one in revisions[1:])]


def test_files_that_another_adapter_has_from_elsewhere_are_removed(stack: StandingStack) -> None:
    assert push(stack, PIRATE) == 0
    stack.says(adapter_entry("pirate", digest=adapter_digest(PIRATE), Ready=SERVES))
    assert rm(stack) == 0
    assert kept(stack) == [".lock"]


def test_of_many_adapters_each_manifest_is_read_once(stack: StandingStack, monkeypatch: pytest.MonkeyPatch) -> None:
    assert push(stack, PIRATE) == 0
    pushed = PushedAdapters(running_stack(stack.data, in_a_cluster=""))
    for number in range(20):
        digest = f"{number:064x}"
        (pushed.folder / digest).mkdir()
        manifest = stack.manifests / f"default.n{number}.pushed.yaml"
        manifest.write_text(f"# {digest}\n")
        (pushed.folder / f"{digest}.manifests").write_text(f"{manifest}\n")
    reads: Counter[str] = Counter()
    read_bytes = Path.read_bytes

    def counted(path: Path) -> bytes:
        if path.name.endswith(".pushed.yaml"):
            reads[path.name] += 1
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    assert pushed.remove_unused() == []
    assert (len(reads), set(reads.values())) == (21, {1})


def test_what_is_refused_leaves_nothing_and_the_earlier_revision_declared(
    stack: StandingStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(stack, PIRATE) == 0
    before = declared(stack)
    capsys.readouterr()
    broken = Path(shutil.copytree(PIRATE, tmp_path / "broken"))
    config = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps(config | {"r": 4}))
    assert push(stack, broken, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["check"]["reason"], found["pushed"]) == ("ShapeMismatch", None)
    assert found["check"]["adapter"] == str(broken)
    (broken / "adapter_model.safetensors").unlink()
    assert push(stack, broken, "other") == 1
    assert "has no adapter_model.safetensors" in capsys.readouterr().out
    assert kept(stack) == [".lock", place_of(PIRATE)]
    assert declared(stack) == before
    assert len(list(stack.manifests.glob("*.pushed.yaml"))) == 1


def test_a_copy_that_fails_half_way_leaves_nothing(stack: StandingStack, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(read: Any, written: Any) -> None:
        written.write(read.read(10))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(
        StateDirectoryError, match=r"cannot copy .*pirate to .*adapters: No space left on device\. Free"
    ):
        push(stack, PIRATE)
    assert kept(stack) == [".lock"]
    assert not list(stack.manifests.glob("*.pushed.yaml"))


def test_what_a_killed_command_has_left_goes_with_the_next_one(stack: StandingStack) -> None:
    left = [stack.data / "adapters" / name for name in (".push-1", f".trash-{'0' * 64}")]
    for folder in left:
        folder.mkdir(parents=True)
    half = stack.data / "adapters" / place_of(PIRATE)
    half.mkdir()
    (half / "adapter_config.json").write_text("{")
    assert push(stack, PIRATE) == 0
    assert kept(stack) == [".lock", place_of(PIRATE)]
    assert adapter_digest(half) == adapter_digest(PIRATE)


def test_commands_take_turns(stack: StandingStack) -> None:
    assert push(stack, PIRATE) == 0
    other = PushedAdapters(running_stack(stack.data, in_a_cluster=""))
    removal = threading.Thread(target=rm, args=(stack,))
    with other.locked():
        removal.start()
        removal.join(timeout=0.5)
        assert other.manifest_of(ObjectName("default", "desk")).exists()
    removal.join(timeout=60)
    assert not other.manifest_of(ObjectName("default", "desk")).exists()
    assert kept(stack) == [".lock"]


def test_who_waits_for_another_command_is_told(
    stack: StandingStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pushed_adapters, "SILENT_SECONDS", 0.1)
    one, other = (PushedAdapters(running_stack(stack.data, in_a_cluster="")) for _ in range(2))
    said = []

    def waits() -> None:
        with other.locked():
            said.append(capsys.readouterr())

    waiting = threading.Thread(target=waits)
    with one.locked():
        waiting.start()
        waiting.join(timeout=0.5)
        assert not said
    waiting.join(timeout=60)
    assert (said[0].out, said[0].err) == (
        "",
        f"Waiting for another `motet adapter` command, which has locked {stack.data / 'adapters' / '.lock'}.\n",
    )


@pytest.mark.parametrize("as_json", [False, True])
def test_other_commands_need_not_wait_until_the_stack_has_noticed_a_removal(
    stack: StandingStack, capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    assert push(stack, PIRATE) == 0
    stack.says(adapter_entry("desk", digest=adapter_digest(PIRATE), Ready=SERVES))
    removal = threading.Thread(target=rm, args=(stack,), kwargs={"wait_seconds": 60.0, "as_json": as_json})
    removal.start()
    local_stack.until(lambda: not (stack.manifests / "default.desk.pushed.yaml").exists())
    assert push(stack, STORYTELLER) == 0
    removal.join(timeout=60)
    assert not removal.is_alive()
    said = capsys.readouterr().out
    assert "removed default/desk; another command has pushed it again" in said
    assert ('"gone": false' in said) == as_json
    assert kept(stack) == [".lock", *sorted(map(place_of, (PIRATE, STORYTELLER)))]


def test_a_removal_says_of_its_own_files_only_that_they_are_gone(
    stack: StandingStack, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(stack, PIRATE) == 0
    assert push(stack, PIRATE, "chair") == 0
    (stack.data / "adapters" / place_of(STORYTELLER)).mkdir()
    assert rm(stack) == 0
    assert capsys.readouterr().out.endswith("removed default/desk\n")
    assert kept(stack) == [".lock", place_of(PIRATE)]


def test_files_that_change_during_the_copy_are_not_pushed(
    stack: StandingStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Path(shutil.copytree(PIRATE, tmp_path / "trained"))
    copy = shutil.copyfileobj

    def beside_a_training(read: Any, written: Any) -> None:
        copy(read, written)
        (trained / "adapter_config.json").write_text("{}")

    monkeypatch.setattr("shutil.copyfileobj", beside_a_training)
    with pytest.raises(SetupError, match=r"trained changes while it is copied\. Push it again once it is saved"):
        push(stack, trained)
    assert kept(stack) == [".lock"]


def test_a_folder_that_cannot_be_read_or_named_is_not_pushed(
    stack: StandingStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unnamed = Path(shutil.copytree(PIRATE, tmp_path / "a\udcff"))
    with pytest.raises(SetupError, match=r"is not UTF-8\. Rename it"):
        push(stack, unnamed, as_json=True)
    private, exists = PIRATE / "adapter_config.json", Path.exists

    def denied(path: Path) -> bool:
        if path == private:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", denied)
    assert push(stack, PIRATE) == 1
    assert f"{PIRATE} can't be read: Permission denied." in capsys.readouterr().out
    assert not list(stack.manifests.glob("*.pushed.yaml"))


def test_a_base_model_of_a_hub_is_left_to_the_runner(stack: StandingStack, capsys: pytest.CaptureFixture[str]) -> None:
    pool = json.loads((stack.manifests / "pool.json").read_text())
    pool["spec"]["model"]["uri"] = "hf://org/base"
    (stack.manifests / "pool.json").write_text(json.dumps(pool))
    assert push(stack, PIRATE) == 0
    assert "hf://org/base is not a folder of this machine, so only a runner checks" in capsys.readouterr().err
    assert declared(stack).spec.source.digest == adapter_digest(PIRATE)
    assert push(stack, BUNDLED, "empty") == 1
    assert capsys.readouterr().out.startswith(f"refused on hf://org/base: {BUNDLED} has no adapter_config.json.")


# -------------------------------------------------------------------------------------------------------- the names


def test_a_name_that_somebody_has_declared_is_left_alone(stack: StandingStack) -> None:
    place = f"{stack.manifests}/pirate.json:1:1"
    with pytest.raises(SetupError, match=rf"default/pirate is declared at {place}, which .* Change that manifest"):
        push(stack, STORYTELLER, "pirate")
    with pytest.raises(SetupError, match=rf"default/pirate is declared at {place}, which .* Remove it there"):
        rm(stack, "pirate")
    with pytest.raises(SetupError, match="NAME: "):
        rm(stack, "../pirate")
    with pytest.raises(NotFound, match="no adapter default/none has been pushed to this stack"):
        rm(stack, "none")


def test_a_name_stays_its_owners_while_that_manifest_has_a_problem(stack: StandingStack) -> None:
    stack.reads_manifests()
    path = stack.manifests / "pirate.json"
    path.write_text(path.read_text().replace("source", "sauce"))
    with pytest.raises(SetupError, match=rf"default/pirate is declared at {path}:1:1, which .* Change that manifest"):
        push(stack, STORYTELLER, "pirate")
    with pytest.raises(SetupError, match=rf"default/pirate is declared at {path}:1:1, which .* Remove it there"):
        rm(stack, "pirate")
    assert not list(stack.manifests.glob("*.pushed.yaml"))


def test_a_pool_whose_manifest_has_a_problem_goes_on_taking_pushes(stack: StandingStack) -> None:
    assert push(stack, PIRATE, namespace="acme") == 0
    stack.reads_manifests()
    path = stack.manifests / "pool.json"
    path.write_text(path.read_text().replace('"model"', '"modle"', 1))
    assert push(stack, STORYTELLER, namespace="acme") == 0
    stack.layout.accepted_manifests.unlink()
    problem = rf"A manifest has a problem: {path}:.*spec\.model: is required"
    with pytest.raises(SetupError, match=rf"There is no such pool now\.\n{problem}") as refused:
        push(stack, PIRATE, namespace="acme")
    assert "`motet adapter rm desk -n acme`" in refused.value.message
    with pytest.raises(SetupError, match=rf"there is no pool\.\n{problem}"):
        push(stack, PIRATE, "other")


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"name": "../desk"}, "--as: "),
        ({"name": "Desk"}, "--as: "),
        ({"name": "desk\udcff"}, "--as: "),
        ({"name": "desk", "namespace": "a.b"}, "--namespace: "),
        (
            {"name": "desk", "model": "llama"},
            r"no pool serves the base model 'llama'\. Served are: motet-demo \(pool def",
        ),
    ],
)
def test_what_cannot_be_named_so_is_refused_by_its_option(
    named: dict[str, str], says: str, stack: StandingStack
) -> None:
    with pytest.raises(SetupError, match=says):
        push(stack, PIRATE, **named)
    assert not list(stack.manifests.glob("*.pushed.yaml"))


def test_of_several_pools_one_is_named_and_a_name_keeps_it(stack: StandingStack) -> None:
    pool = json.loads((stack.manifests / "pool.json").read_text())
    pool["metadata"]["name"] = "second"
    pool["spec"]["model"]["servedName"] = "other-base"
    (stack.manifests / "second.json").write_text(json.dumps(pool))
    with pytest.raises(SetupError, match=r"several pools could be meant: motet-demo .*, other-base .* with --model"):
        push(stack, PIRATE)
    with pytest.raises(SetupError, match=r"several pools could be meant: motet-demo .*, other-base .* with --model"):
        push(stack, PIRATE, model=str(BUNDLED / "model"))
    assert push(stack, PIRATE, "chair", model="motet-demo") == 0
    assert push(stack, PIRATE, model="other-base") == 0
    assert str(declared(stack).group) == "default/second"
    assert push(stack, STORYTELLER) == 0
    assert declared(stack).spec.source.digest == adapter_digest(STORYTELLER)
    with pytest.raises(SetupError, match="default/desk belongs to pool default/second, and a name keeps its pool"):
        push(stack, PIRATE, model="motet-demo")


def test_of_two_pushes_of_a_new_name_for_different_pools_the_later_one_is_refused(
    stack: StandingStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = json.loads((stack.manifests / "pool.json").read_text())
    pool["metadata"]["name"] = "second"
    pool["spec"]["model"]["servedName"] = "other-base"
    (stack.manifests / "second.json").write_text(json.dumps(pool))
    limits_for = adapter_push.limits_for

    def slowly(base: Base) -> Any:
        monkeypatch.setattr(adapter_push, "limits_for", limits_for)
        assert push(stack, STORYTELLER, model="other-base") == 0
        return limits_for(base)

    monkeypatch.setattr(adapter_push, "limits_for", slowly)
    with pytest.raises(SetupError, match="default/desk belongs to pool default/second, and a name keeps its pool"):
        push(stack, PIRATE, model="motet-demo")
    assert declared(stack).spec.source.digest == adapter_digest(STORYTELLER)


def test_a_pool_that_changes_while_its_base_model_is_read_takes_no_push(
    stack: StandingStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = json.loads((stack.manifests / "pool.json").read_text())
    limits_for = adapter_push.limits_for

    def slowly(base: Base) -> Any:
        pool["spec"]["engine"]["maxLoraRank"] = 4
        (stack.manifests / "pool.json").write_text(json.dumps(pool))
        return limits_for(base)

    monkeypatch.setattr(adapter_push, "limits_for", slowly)
    with pytest.raises(SetupError, match=r"the pool of default/desk has changed meanwhile\. Push it again"):
        push(stack, PIRATE)
    assert not list(stack.manifests.glob("*.pushed.yaml"))


def test_a_base_model_may_be_named_by_its_folder(stack: StandingStack) -> None:
    assert push(stack, PIRATE, model=str(BUNDLED / "model")) == 0
    assert str(declared(stack).group) == "default/demo"


def test_the_name_of_a_state_directory_need_not_be_ascii(tmp_path: Path) -> None:
    with standing_stack(tmp_path / "ä") as stack:
        assert push(stack, PIRATE) == 0
        found = declared(stack).spec.source.uri
        assert found is not None
        place = folder_of(absolute_uri(found, manifest=str(stack.manifests / "any.yaml")))
        assert place == stack.data / "adapters" / place_of(PIRATE)


@pytest.mark.parametrize("name", ["a b", "a%b"])
def test_a_state_directory_that_no_manifest_can_name_takes_no_push(name: str, tmp_path: Path) -> None:
    with standing_stack(tmp_path / name) as stack:
        with pytest.raises(SetupError, match=r"no manifest can name .*adapters, so use another --data-dir: must"):
            push(stack, PIRATE)
        assert not list(stack.manifests.glob("*.pushed.yaml"))


def test_a_pushed_manifest_with_an_error_is_named(stack: StandingStack) -> None:
    assert push(stack, PIRATE) == 0
    path = stack.manifests / "default.desk.pushed.yaml"
    path.write_text(path.read_text().replace("source:", "sauce:"))
    with pytest.raises(
        SetupError,
        match=r"spec\.source: is required\. Correct this manifest, or remove it with `motet adapter rm desk -n d",
    ):
        push(stack, STORYTELLER)
    assert rm(stack) == 0
    assert kept(stack) == [".lock"]


def test_a_pushed_manifest_may_have_empty_documents(stack: StandingStack) -> None:
    assert push(stack, PIRATE) == 0
    path = stack.manifests / "default.desk.pushed.yaml"
    path.write_text(f"---\n{path.read_text()}---\n---\n# nothing\n")
    assert push(stack, STORYTELLER) == 0
    assert declared(stack).spec.source.digest == adapter_digest(STORYTELLER)


def test_what_a_push_has_written_outlives_the_machine(stack: StandingStack, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync, manifest = os.fsync, stack.manifests / "default.desk.pushed.yaml"

    def seen(file: int) -> None:
        synced.append(f"{Path(f'/proc/self/fd/{file}').readlink()} {manifest.exists()}")
        fsync(file)

    monkeypatch.setattr(os, "fsync", seen)
    assert push(stack, PIRATE) == 0
    record = stack.data / "adapters" / f".{place_of(PIRATE)}.manifests.{os.getpid()}"
    content = stack.manifests / f".{manifest.name}.{os.getpid()}"
    assert synced[-4:] == [f"{record} False", f"{record.parent} False", f"{content} False", f"{stack.manifests} True"]


@pytest.mark.parametrize("left", [b"", b"\n", bytes(300)])
def test_a_pushed_manifest_that_was_emptied_is_written_anew_or_removed(left: bytes, stack: StandingStack) -> None:
    """As a crash of the machine may leave it. It does not say which files it has named, so all stay."""
    path = stack.manifests / "default.desk.pushed.yaml"
    assert push(stack, PIRATE) == 0
    path.write_bytes(left)
    assert push(stack, STORYTELLER, "chair") == 0
    assert kept(stack) == [".lock", *sorted(map(place_of, (PIRATE, STORYTELLER)))]
    assert push(stack, PIRATE) == 0
    assert declared(stack).spec.source.digest == adapter_digest(PIRATE)
    path.write_bytes(left)
    assert rm(stack) == 0
    assert not path.exists()
    assert kept(stack) == [".lock", place_of(STORYTELLER)]


def test_a_pushed_manifest_that_declares_more_is_left_alone(stack: StandingStack) -> None:
    assert push(stack, PIRATE) == 0
    path = stack.manifests / "default.desk.pushed.yaml"
    path.write_text(f"{path.read_text()}---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: acme}}\n")
    with pytest.raises(SetupError, match=r"does not declare default/desk alone\. Move what else is in it to another"):
        push(stack, STORYTELLER)
    with pytest.raises(SetupError, match=r"does not declare default/desk alone\. Move what else is in it to another"):
        rm(stack)
    path.write_text(path.read_text().replace("source:", "sauce:"))
    with pytest.raises(SetupError, match=r"spec\.source: is required\. Correct this manifest first: it may declare"):
        rm(stack)
    assert path.exists()


def test_a_manifest_that_no_push_has_written_is_left_alone(stack: StandingStack) -> None:
    path = stack.manifests / "default.desk.pushed.yaml"
    path.write_text((stack.manifests / "pirate.json").read_text())
    with pytest.raises(SetupError, match="does not declare default/desk alone"):
        rm(stack)
    path.write_text("kind: [")
    with pytest.raises(SetupError, match=r"is not YAML.*Correct this manifest first"):
        rm(stack)
    assert path.exists()


def test_a_stack_that_watches_one_file_takes_no_push(tmp_path: Path) -> None:
    with standing_stack(tmp_path, watched="manifests/pool.json") as stack:
        with pytest.raises(
            SetupError, match=r"`motet up` watches one file, .*pool\.json\. Start it with -f and a folder"
        ):
            push(stack, PIRATE)
        assert not (stack.data / "adapters").exists()


def test_without_a_stack_the_commands_say_what_a_cluster_needs(tmp_path: Path) -> None:
    done = motet("adapter", "push", str(PIRATE), "--as", "desk", "--data-dir", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "kubectl apply a LoRAAdapter (docs/guides/tenant.md)" in done.stderr
    done = motet("adapter", "rm", "desk", "-n", "acme", "--data-dir", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "In a cluster: kubectl delete lora desk -n acme" in done.stderr


def test_with_json_the_code_of_an_error_says_who_can_correct_it(stack: StandingStack, tmp_path: Path) -> None:
    said = []
    for data, name in ((tmp_path / "nothing", "desk"), (stack.data, "Desk")):
        done = motet("adapter", "push", str(PIRATE), "--as", name, "--data-dir", str(data), "--json")
        assert done.returncode == 2
        document = json.loads(done.stdout)
        assert f"motet: {document['error']['message']}\n" in done.stderr
        said.append((document["check"], document["pushed"], document["error"]["code"]))
    assert said == [(None, None, "state_directory_unusable"), (None, None, "setup_error")]


def test_only_a_name_that_nothing_declares_is_new(stack: StandingStack, capsys: pytest.CaptureFixture[str]) -> None:
    assert push(stack, PIRATE, new=True, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["pushed"]["new"]
    with pytest.raises(AlreadyDeclared, match=r"default/desk is declared already\. Leave --new out"):
        push(stack, STORYTELLER, new=True)
    assert declared(stack).spec.source.digest == adapter_digest(PIRATE)
    assert push(stack, STORYTELLER, as_json=True) == 0
    assert not json.loads(capsys.readouterr().out)["pushed"]["new"]


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        (("check", "nowhere"), {}),
        (("push", str(PIRATE), "--as", "desk", "--to", "s3://abc/x", "--new"), {"check": None, "pushed": None}),
        (("ls",), {"adapters": None}),
        (("show", "a/b/c"), {}),
        (("push", str(PIRATE), "--as", "desk", "--to", "s3://ab"), {"check": None, "pushed": None}),
        (("push", str(PIRATE), "--as", "desk", "--pool", "demo"), {"check": None, "pushed": None}),
        (("rollback", "desk"), {"check": None, "pushed": None}),
    ],
)
def test_every_command_with_json_also_prints_its_error_as_json(
    command: tuple[str, ...], fields: dict[str, None], tmp_path: Path
) -> None:
    done = motet("adapter", *command, "--data-dir", str(tmp_path), "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 2
    assert f"motet: {document.pop('error')['message']}\n" in done.stderr
    assert document == fields


def test_a_removal_in_json_says_what_went_and_who_can_correct_an_error(stack: StandingStack, tmp_path: Path) -> None:
    assert push(stack, PIRATE) == 0
    done = motet("adapter", "rm", "desk", "--data-dir", str(stack.data), "--json")
    removed = json.loads(done.stdout)["removed"]
    assert (done.returncode, removed["namespace"], removed["name"], removed["gone"]) == (0, "default", "desk", True)
    assert len(removed["digests"]) == 1
    said = []
    for data, name in ((tmp_path / "nothing", "desk"), (stack.data, "Desk"), (stack.data, "desk")):
        done = motet("adapter", "rm", name, "--data-dir", str(data), "--json")
        document = json.loads(done.stdout)
        assert document["removed"] is None
        assert f"motet: {document['error']['message']}\n" in done.stderr
        said.append(document["error"]["code"])
    assert said == ["state_directory_unusable", "setup_error", "not_found"]


# -------------------------------------------------------------------------------------------------------- the waiting


class Clock:
    now = 1.0

    def __call__(self) -> float:
        return self.now


def awaited(stack: StandingStack, clock: Clock, *, before: int | None = None) -> Awaited:
    found: LocalStack = running_stack(stack.data, in_a_cluster="")
    source = {"uri": "file:///files", "digest": DIGEST}
    manifest = write_adapter(stack.manifests, "desk", uri="file:///files", source=source)
    return Awaited(found, ObjectName("default", "desk"), Digest(DIGEST), manifest=manifest, before=before, clock=clock)


def test_a_push_is_done_when_these_files_serve(stack: StandingStack) -> None:
    waiting = awaited(stack, Clock())
    assert waiting.look() is None
    stack.says(adapter_entry("desk", digest=None, Ready=("Unknown", "Checking", "a runner is checking")))
    assert waiting.look() is None
    stack.says(adapter_entry("desk", digest=f"sha256:{'c' * 64}", Ready=SERVES))
    assert waiting.look() is None, "the earlier revision still serves"
    stack.says(entry := adapter_entry("desk", Ready=SERVES))
    assert waiting.look() == Outcome(0, entry)


def test_a_push_that_another_command_undoes_ends(stack: StandingStack) -> None:
    stack.says(adapter_entry("desk", digest=f"sha256:{'c' * 64}", Ready=SERVES))
    waiting = awaited(stack, Clock())
    manifest = write_adapter(stack.manifests, "desk", uri="file:///files")
    for said in (
        "its manifest names other files now, as after another push",
        "its manifest has been removed meanwhile",
    ):
        outcome = waiting.look()
        assert outcome is not None
        assert (outcome.status, outcome.said) == (1, said)
        manifest.unlink(missing_ok=True)


def test_a_refusal_counts_once_it_has_stayed(stack: StandingStack) -> None:
    clock = Clock()
    waiting = awaited(stack, clock)
    entry = adapter_entry("desk", digest=None, Ready=REFUSED, Certified=REFUSED)
    stack.says(entry)
    assert waiting.look() is None
    clock.now += 2.5
    assert waiting.look() is None
    clock.now += 0.6
    assert waiting.look() == Outcome(1, entry, "ShapeMismatch: wrong shapes")


def test_a_refusal_of_earlier_files_does_not_count(stack: StandingStack) -> None:
    clock = Clock()
    waiting = awaited(stack, clock, before=1)
    stack.says(adapter_entry("desk", digest=None, Ready=REFUSED, Certified=REFUSED))
    for _ in range(3):
        clock.now += 10
        assert waiting.look() is None


def test_an_adapter_of_a_pool_without_runners_is_not_waited_for(stack: StandingStack) -> None:
    stack.says(adapter_entry("desk", digest=None, Ready=("True", "ScaledToZero", "no runner is needed now")))
    assert awaited(stack, Clock()).look() == Outcome(0, None, "ScaledToZero: no runner is needed now")


def test_a_push_that_waits_too_long_says_for_what(stack: StandingStack, capsys: pytest.CaptureFixture[str]) -> None:
    assert push(stack, PIRATE, wait_seconds=0.2) == 1
    assert (
        "does not serve these files: not ready after 0.2 s: the operator has not read its manifest"
        in capsys.readouterr().out
    )
    waiting = ("Unknown", "WaitingForRunner", "no runner of pool default/demo is ready")
    stack.says(adapter_entry("desk", digest=None, Ready=waiting))
    assert push(stack, PIRATE, wait_seconds=0.2, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)["pushed"]
    assert found["message"] == "not ready after 0.2 s: WaitingForRunner: no runner of pool default/demo is ready"
    assert (found["ready"], found["changed"]) == (False, False)


def test_a_served_adapter_comes_with_commands_to_try(stack: StandingStack, capsys: pytest.CaptureFixture[str]) -> None:
    stack.says(adapter_entry("desk", digest=adapter_digest(PIRATE), Ready=SERVES))
    assert push(stack, PIRATE, wait_seconds=5.0) == 0
    said = capsys.readouterr().out
    assert "default/desk is served. Try:" in said
    assert "curl http://x/v1/chat/completions" in said
    assert f"chat default/desk --data-dir {stack.data}" in said
    assert "motet key create" not in said
    (stack.data / KEYS_MADE_FILE).touch()
    assert push(stack, PIRATE, wait_seconds=5.0) == 0
    assert "These commands need an API key. Make one: motet key create" in capsys.readouterr().out


def test_files_stay_until_the_stack_has_noticed_that_the_name_is_gone(
    stack: StandingStack, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(stack, PIRATE) == 0
    stack.says(adapter_entry("desk", digest=adapter_digest(PIRATE), Ready=SERVES))
    assert rm(stack, wait_seconds=0.2) == 1
    assert "the stack still has the adapter after 0.2 s. See the operator's log" in capsys.readouterr().err
    assert kept(stack) == [".lock", place_of(PIRATE)]
    assert not (stack.manifests / "default.desk.pushed.yaml").exists()
    stack.says()
    assert push(stack, STORYTELLER, "other") == 0
    assert rm(stack, "other") == 0
    assert kept(stack) == [".lock"]
