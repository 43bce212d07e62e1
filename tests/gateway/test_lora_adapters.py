"""/v1/load_lora_adapter and /v1/unload_lora_adapter: who may call them, what is refused before anything runs, and the
bounds of what runs. Here a small program stands in for `motet adapter`; tests/stack/test_one_runner.py has the
real one on a whole stack."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from motet.domain import ObjectName
from motet.errors import AlreadyDeclared
from motet.keys import KeyScope
from motet.resources import LoRAAdapter, read_text
from motet_gateway import lora_changes
from motet_gateway.lora_bodies import folder_below, recipe_to_load
from motet_gateway.routes import loras
from testbed.fake_services import FakeServices
from tests.common.waiting import PATIENCE_S
from tests.gateway.conftest import Served, eventually, serve
from tests.gateway.identity.memory_keys import MemoryKeySource, bearer
from tests.gateway.test_errors import error_of
from tests.gateway.test_openapi import check

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
DESK = {"lora_name": "desk", "lora_path": "desk"}
DIGEST = "sha256:" + "d" * 64

PROGRAM = """
import json, os, sys, time
folder = {folder!r}
with open(os.path.join(folder, "calls"), "a") as calls:
    calls.write(json.dumps([os.getpid(), *sys.argv[1:]]) + "\\n")
while not os.path.exists(os.path.join(folder, "go")):
    time.sleep(0.01)
said = json.load(open(os.path.join(folder, sys.argv[1])))
print(json.dumps(said["document"]))
sys.stderr.write(said["written"])
sys.exit(said["exit"])
"""


class Program:
    """In the place of `motet adapter`: it notes how it was called, and says what a test wants once it may."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = (sys.executable, "-S", "-c", PROGRAM.format(folder=str(folder)))
        self.pushes(pushed={"ready": True, "digest": DIGEST, "message": ""})
        self.says("rm", {}, 0)
        self.go()

    def says(self, command: str, document: dict[str, Any], status: int | str, written: str = "") -> None:
        said = {"document": document, "exit": status, "written": written}
        (self.folder / command).write_text(json.dumps(said))

    def pushes(
        self, pushed: dict[str, Any] | None, status: int | str = 0, reason: str = "", digest: str = DIGEST
    ) -> None:
        check = {"digest": digest, "reason": reason, "message": "what the check says"}
        self.says("push", {"check": check, "pushed": pushed}, status)

    def go(self) -> None:
        (self.folder / "go").touch()

    def wait(self) -> None:
        (self.folder / "go").unlink()

    @property
    def calls(self) -> list[list[Any]]:
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]
        return []

    def runs(self, number: int) -> bool:
        return Path(f"/proc/{self.calls[number][0]}").exists()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    program = Program(tmp_path)
    monkeypatch.setattr(lora_changes, "COMMAND", program.command)
    monkeypatch.setattr(loras, "CATALOG_SECONDS", 0.05)
    return program


def local(cluster: FakeServices, **settings: Any) -> Any:
    """A gateway of a local stack where adapters of two folders may be loaded"""
    folders = [Path("/srv/adapters"), Path("/opt/adapters")]
    return serve(cluster, **{"metrics_dir": cluster.folder, "adapter_folders": folders, **settings})


async def post(served: Served, path: str, body: dict[str, Any], key: str = "") -> httpx2.Response:
    answer = await served.http.post(path, json=body, headers=bearer(key) if key else None)
    check(answer)
    return answer


async def refusal(served: Served, path: str, body: dict[str, Any], key: str = "") -> tuple[int, str, str]:
    answer = await post(served, path, body, key)
    error = error_of(answer)
    return answer.status_code, error["param"] or error["code"], error["message"]


# ------------------------------------------------------------------------------------------------- who may, and where


async def test_only_the_scope_admin_changes_adapters_and_only_those_of_its_tenant(
    cluster: FakeServices, program: Program
) -> None:
    kept = MemoryKeySource()
    admin, user = kept.make("acme", KeyScope.ADMIN), kept.make("acme", KeyScope.USER, KeyScope.MONITOR)
    async with local(cluster, keys=kept, auth="keys") as served:
        for path in (LOAD, UNLOAD):
            assert (await served.http.post(path, json=DESK)).status_code == 401
            assert (await refusal(served, path, DESK, user))[:2] == (403, "insufficient_scope")
            found = await refusal(served, path, DESK | {"lora_name": "zeta/desk"}, admin)
            assert found == (400, "lora_name", "lora_name: your key is for adapters of acme; leave 'zeta/' out")
        assert not program.calls
        assert (await post(served, LOAD, DESK, admin)).text == "Success: LoRA adapter 'desk' added successfully."
        assert (await post(served, UNLOAD, {"lora_name": "acme/desk"}, admin)).status_code == 200
    assert ["--namespace=acme" in call for call in program.calls] == [True, True]


async def test_the_local_stack_says_how_to_allow_it(cluster: FakeServices, program: Program) -> None:
    async with serve(cluster, metrics_dir=cluster.folder) as served:
        status, code, message = await refusal(served, LOAD, DESK)
        assert (status, code) == (403, "changes_not_allowed")
        assert "`motet adapter push DIR --as desk -n default`" in message
        assert "MOTET_GATEWAY_ADAPTER_FOLDERS='[\"/folder/of/adapters\"]' motet up" in message
        assert "`motet adapter rm desk -n default`" in (await refusal(served, UNLOAD, DESK))[2]
    assert not program.calls


async def test_a_cluster_answers_with_what_to_apply(cluster: FakeServices, program: Program) -> None:
    async with serve(cluster, adapter_folders=["/srv/adapters"]) as served:
        status, code, message = await refusal(served, LOAD, DESK)
        assert (status, code) == (403, "changes_not_allowed")
        assert "\nkubectl apply --server-side -f - <<'END'\n" in message
        status, code, message = await refusal(served, UNLOAD, {"lora_name": "acme/desk"})
        assert message.endswith("\nkubectl delete lora desk -n acme")
    assert not program.calls


def manifest_in(recipe: str) -> str:
    command, *lines, end = recipe.splitlines()
    assert (command, end) == ("kubectl apply --server-side -f - <<'END'", "END")
    assert "END" not in lines
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("org/legal-lora", {"uri": "hf://org/legal-lora"}),
        ("s3://bucket/x", {"uri": "s3://bucket/x"}),
        ("/data/legal/", {"persistent_volume_claim": {"claim_name": "your-claim", "path": "data/legal"}}),
    ],
)
def test_the_recipe_is_a_valid_manifest(path: str, source: dict[str, Any]) -> None:
    recipe = recipe_to_load(ObjectName("acme", "desk"), path, "motet-pools/demo")
    (found,) = read_text(manifest_in(recipe)).manifests
    assert isinstance(found.resource, LoRAAdapter)
    assert (str(found.resource.object_name), str(found.resource.group)) == ("acme/desk", "motet-pools/demo")
    assert found.resource.spec.source.model_dump(exclude_none=True, exclude_defaults=True) == source


@pytest.mark.parametrize("name", ["123", "on", "null", "1e3", "0x1"])
def test_a_name_of_the_recipe_is_no_number_and_no_truth_value(name: str) -> None:
    recipe = recipe_to_load(ObjectName(name, name), "org/x", f"{name}/{name}")
    (found,) = read_text(manifest_in(recipe)).manifests
    assert isinstance(found.resource, LoRAAdapter)
    assert (str(found.resource.object_name), str(found.resource.group)) == (f"{name}/{name}",) * 2


def test_a_path_of_the_recipe_is_read_as_it_was_said() -> None:
    said = "d/\U0001f600é\u2028\x7f'\\"
    manifest = yaml.safe_load(manifest_in(recipe_to_load(ObjectName("acme", "desk"), said, "motet-pools/demo")))
    assert manifest["spec"]["source"]["persistentVolumeClaim"]["path"] == said


def test_no_path_makes_another_command_of_the_recipe() -> None:
    recipe = recipe_to_load(ObjectName("acme", "desk"), "x'\"}\nEND\nrm -rf /", "motet-pools/demo")
    (problem,) = read_text(manifest_in(recipe)).problems
    assert problem.field == "spec.source.persistentVolumeClaim.path"


# ---------------------------------------------------------------------------------------------- what is refused at once


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "lora_name", "this field is required"),
        ({"lora_name": "desk"}, "lora_path", "this field is required"),
        ({"lora_name": ""}, "lora_name", ""),
        ({"lora_name": "My_LoRA"}, "lora_name", "can't be the name of an adapter here; use at most 63 lower-case"),
        ({"lora_name": "--help"}, "lora_name", "can't be the name"),
        ({"lora_name": "a/b/c"}, "lora_name", "can't be the name"),
        ({"lora_name": "a" * 64}, "lora_name", "can't be the name"),
        ({"lora_name": "desk.v2"}, "lora_name", "can't be the name"),
        ({"lora_name": "tiny"}, "lora_name", "is the name of a base model"),
        ({"lora_name": "legal"}, "lora_name", "The lora adapter 'legal' has already been loaded. If you want to load"),
        (
            {"lora_path": "/etc"},
            "lora_path",
            "must lie below /srv/adapters or /opt/adapters (MOTET_GATEWAY_ADAPTER_FOLD",
        ),
        ({"lora_path": "/srv/adapters-of-others/x"}, "lora_path", "must lie below"),
        ({"lora_path": "/srv/adapters/../../etc"}, "lora_path", "without '..'"),
        ({"lora_path": "../x"}, "lora_path", "without '..'"),
        ({"lora_path": "a\0b"}, "lora_path", "only a folder of this machine"),
        ({"lora_path": "hf://org/x"}, "lora_path", "write a LoRAAdapter"),
        ({"lora_path": "x" * 4097}, "lora_path", ""),
        ({"base_model_name": "nix"}, "base_model_name", "one of these: tiny"),
        ({"base_model_name": "legal"}, "base_model_name", "one of these: tiny"),
        ({"load_inplace": "yes"}, "load_inplace", ""),
        ({"is_3d_lora_weight": True}, "is_3d_lora_weight", "not supported"),
    ],
)
async def test_what_is_wrong_is_named_before_anything_runs(
    cluster: FakeServices, program: Program, body: dict[str, Any], param: str, words: str
) -> None:
    cluster.add_adapter("legal")
    whole = body if body.keys() <= {"lora_name"} and body.get("lora_name", "desk") == "desk" else DESK | body
    async with local(cluster) as served:
        found = await refusal(served, LOAD, whole)
    assert (found[0], found[1]) == (400, param)
    assert words in found[2]
    assert not program.calls


@pytest.mark.parametrize("body", [b"x" * 70_000, b"[" * 1000, b"{", b"[]", b""])
async def test_a_body_that_is_no_small_object_is_refused(cluster: FakeServices, program: Program, body: bytes) -> None:
    async with local(cluster) as served:
        answer = await served.http.post(LOAD, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in {400, 413}
        page = await served.http.post(LOAD, content=json.dumps(DESK), headers={"content-type": "text/plain"})
        assert page.status_code == 415, "what a web page may send without asking"
    assert not program.calls


def test_a_relative_path_is_below_the_first_folder() -> None:
    folders = (Path("/srv/adapters"), Path("/opt/adapters"))
    assert folder_below("a/b", folders) == (folders[0], Path("/srv/adapters/a/b"))
    assert folder_below("/opt/adapters/x", folders) == (folders[1], Path("/opt/adapters/x"))
    assert folder_below("/srv/adapters", folders) == (folders[0], folders[0])


# ------------------------------------------------------------------------------------------------------------ what runs


async def test_the_command_gets_all_that_was_asked_for(cluster: FakeServices, program: Program) -> None:
    cluster.add_adapter("legal", digest=DIGEST)
    async with local(cluster) as served:
        body = {"lora_name": "legal", "lora_path": "/opt/adapters/x y", "load_inplace": True, "base_model_name": "tiny"}
        answer = await post(served, LOAD, body)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'legal' added successfully.")
        group = served.gateway.catalog.current.groups[0].group
    ((_, *call),) = program.calls
    assert call == [
        *("push", "/opt/adapters/x y", "--as=legal", "--namespace=default", "--json", "--below=/opt/adapters"),
        *(f"--model={group}", "--wait=120", f"--data-dir={cluster.folder}"),
    ]


@pytest.mark.parametrize(
    ("pushes", "expected"),
    [
        ({"pushed": None, "status": 1, "reason": "RankTooLarge"}, (400, "lora_path", "what the check says")),
        ({"pushed": None, "status": 1, "digest": ""}, (404, "lora_path", "what the check says")),
        ({"pushed": None, "status": 1, "digest": "", "reason": "TooLarge"}, (400, "lora_path", "what the check says")),
        ({"pushed": {"message": "NoEffect: x"}, "status": 1}, (400, "lora_path", "NoEffect: x")),
        ({"pushed": {"message": "x"}, "status": 9}, (500, "internal_error", "")),
    ],
)
async def test_a_refusal_has_the_words_of_the_check(
    cluster: FakeServices, program: Program, pushes: dict[str, Any], expected: tuple[int, str, str]
) -> None:
    program.pushes(**pushes)
    async with local(cluster) as served:
        found = await refusal(served, LOAD, DESK)
    assert found[:2] == expected[:2]
    assert expected[2] in found[2]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            "Traceback:\n  File '/srv/secret.py'\nRuntimeError: x",
            (500, "internal_error", "the gateway's log says more"),
        ),
        ("motet: it says why", (400, "lora_path", "it says why")),
        ("12:00 [info] a line of its log\nmotet: it says why:\nthis", (400, "lora_path", "it says why:\nthis")),
    ],
)
async def test_a_crash_of_the_command_is_no_answer(
    cluster: FakeServices, program: Program, written: str, expected: tuple[int, str, str]
) -> None:
    program.says("push", {}, written)
    async with local(cluster) as served:
        status, where, message = await refusal(served, LOAD, DESK)
    assert (status, where) == expected[:2]
    assert message.endswith(expected[2] + "." * (status == 500))
    assert not {"secret", "info"} & set(message.replace("/", " ").replace(".", " ").split())


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("setup_error", (400, "lora_path")),
        ("state_directory_unusable", (503, "overloaded")),
        ("model_folder_invalid", (503, "overloaded")),
        (None, (503, "overloaded")),
    ],
)
async def test_a_full_disk_and_a_stopped_stack_are_not_what_the_client_has_to_correct(
    cluster: FakeServices, program: Program, code: str | None, expected: tuple[int, str]
) -> None:
    document = {"check": None, "pushed": None, "error": {"code": code, "message": "why"}} if code else {}
    program.says("push", document, 2, "motet: why\n")
    program.says("rm", document, 2, "motet: why\n")
    cluster.add_adapter("legal")
    async with local(cluster) as served:
        assert await refusal(served, LOAD, DESK) == (*expected, "why")
        status, where = expected
        unload = (status, "lora_name" if where == "lora_path" else where, "why")
        assert await refusal(served, UNLOAD, {"lora_name": "legal"}) == unload


async def test_a_new_name_is_free_again_after_a_refusal_and_one_that_serves_stays(
    cluster: FakeServices, program: Program
) -> None:
    cluster.add_adapter("legal")
    async with local(cluster) as served:
        program.pushes({"message": "NoEffect: x", "new": False}, status=1)
        await refusal(served, LOAD, DESK | {"lora_name": "legal", "load_inplace": True})
        await refusal(served, LOAD, DESK | {"load_inplace": True})  # declared, but not served: no catalog has it
        assert [call[1] for call in program.calls] == ["push", "push"]
        program.pushes({"message": "NoEffect: x", "new": True}, status=1)
        await refusal(served, LOAD, DESK)
    assert [call[1:3] for call in program.calls[2:]] == [["push", "/srv/adapters/desk"], ["rm", "desk"]]


async def test_a_name_that_is_declared_and_not_served_is_loaded_in_place_only(
    cluster: FakeServices, program: Program
) -> None:
    error = {"code": AlreadyDeclared.mapping.code, "message": "default/desk is declared already."}
    program.says("push", {"check": None, "pushed": None, "error": error}, 2, "motet: default/desk is declared already.")
    async with local(cluster) as served:
        status, param, message = await refusal(served, LOAD, DESK)
        assert (status, param) == (400, "lora_name")
        assert message.startswith("The lora adapter 'desk' has already been loaded.")
        program.pushes({"ready": False, "digest": DIGEST, "new": False, "message": "Suspended: spec.suspend is true."})
        found = await refusal(served, LOAD, DESK | {"load_inplace": True})
        assert found == (400, "lora_name", "'desk' is declared, but not served: Suspended: spec.suspend is true.")
    assert ["--new" in call for call in program.calls] == [True, False]


async def test_what_is_not_there_or_somebody_elses_is_not_unloaded(cluster: FakeServices, program: Program) -> None:
    cluster.add_adapter("legal")
    async with local(cluster) as served:
        program.says("rm", {}, "motet: no adapter")
        expected = (404, "lora_name", "The lora adapter 'desk' cannot be found.")
        assert await refusal(served, UNLOAD, {"lora_name": "desk"}) == expected
        program.says("rm", {}, 2)
        assert (await refusal(served, UNLOAD, {"lora_name": "legal"}))[:2] == (400, "lora_name")
        program.says("rm", {}, "motet: still there")
        assert (await refusal(served, UNLOAD, {"lora_name": "legal"}))[0] == 503


async def test_the_answer_comes_once_requests_find_the_adapter(
    cluster: FakeServices, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loras, "CATALOG_SECONDS", PATIENCE_S)
    async with local(cluster) as served:
        asked = asyncio.create_task(post(served, LOAD, DESK))
        await eventually(lambda: program.calls and not program.runs(0))
        cluster.add_adapter("desk")
        cluster.scheduler.publish()  # with the files before these
        await asyncio.sleep(0.1)
        assert not asked.done()
        cluster.scheduler.adapters.clear()
        cluster.add_adapter("desk", digest=DIGEST)
        cluster.scheduler.publish()
        assert (await asked).status_code == 200
        asked = asyncio.create_task(post(served, UNLOAD, DESK))
        await eventually(lambda: len(program.calls) == 2 and not program.runs(1))
        await asyncio.sleep(0.1)
        assert not asked.done()
        cluster.scheduler.adapters.clear()
        cluster.scheduler.publish()
        assert (await asked).status_code == 200


# --------------------------------------------------------------------------------------------------------------- bounds


async def test_changes_of_one_name_wait_for_each_other_and_there_are_not_too_many(
    cluster: FakeServices, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_changes, "MAX_CHANGES", 4)
    program.wait()
    async with local(cluster) as served:
        asked = [asyncio.create_task(post(served, LOAD, DESK)) for _ in range(2)]
        await eventually(lambda: len(program.calls) == 1)
        asked += [asyncio.create_task(post(served, LOAD, DESK | {"lora_name": f"d{n}"})) for n in range(2)]
        await eventually(lambda: len(program.calls) == lora_changes.MAX_PROCESSES)
        answer = await post(served, UNLOAD, DESK)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        await asyncio.sleep(0.1)
        assert len(program.calls) == lora_changes.MAX_PROCESSES
        cluster.add_adapter("desk", digest=DIGEST)
        cluster.scheduler.publish()
        program.go()
        answers = await asyncio.gather(*asked)
        assert sorted(answer.status_code for answer in answers[:2]) == [200, 400], "the second finds it loaded"
        assert [answer.status_code for answer in answers[2:]] == [200, 200]
        assert sum("--as=desk" in call for call in program.calls) == 1
        assert (await post(served, UNLOAD, DESK)).status_code == 200, "there is room again"


async def test_a_command_that_takes_too_long_is_killed(
    cluster: FakeServices, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_changes, "MAX_SECONDS", 0.5)
    program.wait()
    async with local(cluster) as served:
        status, _, message = await refusal(served, UNLOAD, DESK)
        assert (status, message) == (503, "motet adapter rm was not done after 0.5 s.")
        assert not program.calls or not program.runs(0)


async def test_a_load_goes_on_without_its_client_and_ends_with_its_key_or_its_gateway(
    cluster: FakeServices, program: Program
) -> None:
    kept = MemoryKeySource()
    key, other = kept.make("acme", KeyScope.ADMIN), kept.make("acme", KeyScope.ADMIN)
    program.wait()
    async with local(cluster, keys=kept, auth="keys", keys_read_seconds=0.02) as served:
        with pytest.raises(httpx2.ReadTimeout):
            await served.http.post(LOAD, json=DESK, headers=bearer(other), timeout=0.3)
        asked = asyncio.create_task(post(served, LOAD, DESK | {"lora_name": "second"}, key))
        await eventually(lambda: len(program.calls) == 2)
        kept.revoke(key)
        assert (await asked).status_code == 401
        await eventually(lambda: not program.runs(1))
        assert program.runs(0)
    assert not program.runs(0)
