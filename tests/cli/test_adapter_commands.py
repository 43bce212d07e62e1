"""`motet adapter ls` and `show`: what the status and the manifests of the local stack say of adapters."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.errors import NotFound, SetupError
from motet_cli import adapter_commands
from motet_cli.adapter_app import named
from testbed.local_stack import BUNDLED, write_adapter
from tests.cli.standing_stack import BASE_DIGEST, DIGEST, StandingStack, adapter_entry, standing_stack
from tests.support.forked_motet import motet

SERVES = ("True", "Serving", "")
WARNING = "task_type is SEQ_CLS, so it was not trained to generate text"
CUT = "adapter_model.safetensors is cut short"


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[StandingStack]:
    with standing_stack(tmp_path) as stack:
        yield stack


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Each line with single spaces."""
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_list_has_phase_digest_rank_places_and_what_to_act_on(
    stack: StandingStack, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = ("False", "FormatRejected", f"{CUT}.")
    stack.says(
        adapter_entry(Ready=SERVES, warnings=(WARNING,), resident=(("demo-1", "device"), ("demo-2", "disk"))),
        adapter_entry("desk", Ready=SERVES, ArtifactReady=refused),
        adapter_entry("broken", digest=None, Ready=refused, ArtifactReady=refused),
    )
    assert adapter_commands.ls(stack.data, as_json=False) == 0
    _, pirate, desk, broken = printed(capsys)
    short = "a" * 12
    resident = "demo-1 (device), demo-2 (disk)"
    assert pirate == f"default/pirate default/pirate Serving {short} 8 {resident} {WARNING}"
    newest = f"the newest revision is refused: FormatRejected: {CUT}."
    assert desk == f"default/desk default/desk Serving {short} 8 - {newest}"
    assert broken == f"default/broken default/broken FormatRejected - - - {CUT}."


def test_a_program_gets_what_the_status_says_with_source_and_phase(
    stack: StandingStack, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = adapter_entry(Ready=SERVES)
    write_adapter(stack.manifests, "hub", uri="hf://org/name", source={"uri": "hf://org/name", "revision": "v2"})
    write_adapter(
        stack.manifests,
        "claimed",
        uri="",
        source={"persistentVolumeClaim": {"claimName": "store", "path": "a/b"}},
    )
    write_adapter(stack.manifests, "image", uri="", source={"image": "ghcr.io/org/name:v1"})
    others = [adapter_entry(name, Ready=SERVES) for name in ("hub", "claimed", "gone", "image")]
    stack.says(entry, *others)
    assert adapter_commands.ls(stack.data, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)["adapters"]
    source = {"uri": (BUNDLED / "adapters" / "pirate").as_uri(), "revision": None, "digest": None}
    place = f"{stack.manifests}/pirate.json:1:1"
    assert found[0] == entry | {"phase": "Serving", "source": source, "manifest": place}
    assert found[1]["source"] == {"uri": "hf://org/name", "revision": "v2", "digest": None}
    assert found[2]["source"] == {"uri": "pvc://store/a/b", "revision": None, "digest": None}
    assert (found[3]["source"], found[3]["manifest"]) == (None, None)
    assert found[4]["source"] == {"uri": "oci://ghcr.io/org/name:v1", "revision": None, "digest": None}
    assert adapter_commands.show(stack.data, "pirate", namespace="default", as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == found[0]


def test_one_adapter_is_shown_with_all_conditions(stack: StandingStack, capsys: pytest.CaptureFixture[str]) -> None:
    stack.says(
        adapter_entry(
            Accepted=("True", "Valid", ""), Ready=SERVES, warnings=(WARNING,), resident=(("demo-1", "device"),)
        )
    )
    assert adapter_commands.show(stack.data, "pirate", namespace="default", as_json=False) == 0
    assert printed(capsys) == [
        "adapter default/pirate",
        "model default/pirate",
        "phase Serving",
        f"digest {DIGEST}",
        "rank 8 (lora_alpha 16)",
        "size 0.3 MiB",
        "linears 2: up_proj",
        f"checked by check 5, against {BASE_DIGEST}",
        "proved by the kernels cpp, torch",
        "answers as recorded in training",
        f"source {(BUNDLED / 'adapters' / 'pirate').as_uri()}",
        f"manifest {stack.manifests}/pirate.json:1:1",
        "resident demo-1 (device)",
        f"note {WARNING}",
        "",
        "condition status reason since message",
        "Accepted True Valid 2026-01-02T03:04:05Z",
        "Ready True Serving 2026-01-02T03:04:05Z",
    ]


def test_a_manifest_with_a_problem_has_the_source_that_is_in_use(
    stack: StandingStack, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.reads_manifests()
    path = stack.manifests / "pirate.json"
    path.write_text(path.read_text().replace("source", "sauce"))
    stack.says(adapter_entry(Ready=SERVES))
    assert adapter_commands.ls(stack.data, as_json=True) == 0
    (found,) = json.loads(capsys.readouterr().out)["adapters"]
    assert (found["source"]["uri"], found["manifest"]) == ((BUNDLED / "adapters" / "pirate").as_uri(), f"{path}:1:1")


def test_an_unknown_name_gets_the_nearest_one(stack: StandingStack) -> None:
    stack.says(adapter_entry(namespace="acme", Ready=SERVES))
    with pytest.raises(NotFound, match=r"no adapter default/pirat in this stack\. Did you mean acme/pirate\?"):
        adapter_commands.show(stack.data, "pirat", namespace="default", as_json=False)
    with pytest.raises(NotFound, match="`motet adapter ls` lists all"):
        adapter_commands.show(stack.data, "zzz", namespace="default", as_json=False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("pirate", None), ("default", "pirate")),
        (("pirate", "acme"), ("acme", "pirate")),
        (("acme/pirate", None), ("acme", "pirate")),
        (("acme/pirate", "acme"), ("acme", "pirate")),
        (("pirate", ""), ("", "pirate")),
    ],
)
def test_a_name_may_be_written_as_it_is_listed(given: tuple[str, str | None], expected: tuple[str, str]) -> None:
    assert named(*given) == expected


@pytest.mark.parametrize("given", ["/pirate", "a/b/pirate", "Acme/pirate", "acme/Pirate", "acme/"])
def test_a_part_of_a_name_that_is_none_is_refused_by_the_names_field(given: str) -> None:
    with pytest.raises(SetupError, match=r"^--as: must be a DNS label"):
        named(given, None, "--as")


@pytest.mark.parametrize("command", ["show", "rollback", "rm"])
def test_a_name_in_two_namespaces_is_refused(command: str, tmp_path: Path) -> None:
    done = motet("adapter", command, "acme/pirate", "-n", "other", "--data-dir", str(tmp_path))
    assert done.returncode == 2
    assert "NAME 'acme/pirate' and --namespace 'other' name two namespaces. Remove one of them." in done.stderr


def test_a_stack_without_adapters_says_so(stack: StandingStack) -> None:
    (stack.manifests / "pirate.json").unlink()
    done = motet("adapter", "ls", "--data-dir", str(stack.data))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "There are no adapters yet. Add one: motet adapter push DIR --as NAME\n"


def test_what_is_declared_and_not_in_the_status_yet_is_said(
    stack: StandingStack, capsys: pytest.CaptureFixture[str]
) -> None:
    assert adapter_commands.ls(stack.data, as_json=False) == 0
    assert capsys.readouterr().err.startswith("Adapters are declared, but the operator says nothing of them yet.")
    with pytest.raises(NotFound, match=r"default/pirate is declared, but the operator says nothing of it yet\."):
        adapter_commands.show(stack.data, "pirate", namespace="default", as_json=False)


def test_without_a_stack_the_commands_say_how_to_start_one_and_what_a_cluster_has(tmp_path: Path) -> None:
    done = motet("adapter", "ls", "--data-dir", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"Motet is not running (state directory {tmp_path}). Start it: motet up --data-dir {tmp_path}" in done.stderr
    assert "In a cluster: kubectl get lora -A" in done.stderr
    with pytest.raises(SetupError, match="In a cluster: kubectl describe lora legal -n acme"):
        adapter_commands.show(tmp_path, "legal", namespace="acme", as_json=False)
