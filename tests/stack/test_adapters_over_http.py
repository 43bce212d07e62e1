"""Adapters are loaded and unloaded as a client of vLLM does it, on a whole stack."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from motet.digest import adapter_digest
from testbed.local_stack import BUNDLED, LocalStack, copy_of_bundled, running_stack

pytestmark = pytest.mark.stack

QUESTION = "Who keeps the lighthouse of Brindle?"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("http")
    allowed = folder / "adapters"
    for name in ("pirate", "json"):
        shutil.copytree(BUNDLED / "adapters" / name, allowed / name)
    (allowed / "link").symlink_to(BUNDLED / "adapters" / "oneword")
    broken = Path(shutil.copytree(allowed / "pirate", allowed / "broken"))
    config = broken / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 4}))
    (folder / "elsewhere").mkdir()
    shutil.copytree(BUNDLED / "adapters" / "oneword", folder / "elsewhere" / "oneword")
    (linked := allowed / "linked").mkdir()
    shutil.copy(allowed / "pirate" / "adapter_config.json", linked)
    (linked / "adapter_model.safetensors").symlink_to(BUNDLED / "adapters" / "pirate" / "adapter_model.safetensors")
    manifests = copy_of_bundled(folder / "manifests", adapters=["shouting"])
    env = {"MOTET_GATEWAY_ADAPTER_FOLDERS": json.dumps([str(allowed)])}
    with running_stack(folder, manifests=manifests, env=env) as stack:
        yield stack


def post(stack: LocalStack, what: str, **body: Any) -> httpx.Response:
    with stack.http() as http:
        return http.post(f"/v1/{what}_lora_adapter", json=body, timeout=180)


def refusal(stack: LocalStack, what: str, **body: Any) -> tuple[int, str]:
    answer = post(stack, what, **body)
    return answer.status_code, answer.json()["error"]["message"]


def models(stack: LocalStack) -> dict[str, Any]:
    with stack.http() as http:
        return {one["id"]: one for one in http.get("/v1/models").json()["data"]}


def test_an_adapter_comes_is_replaced_and_goes(stack: LocalStack) -> None:
    answer = post(stack, "load", lora_name="desk", lora_path="pirate")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'desk' added successfully.")
    assert "Arr" in stack.ask("desk", QUESTION)
    status, said = refusal(stack, "load", lora_name="desk", lora_path="json")
    assert (status, said[:51]) == (400, "The lora adapter 'desk' has already been loaded. If"), said
    path = str(stack.folder / "adapters" / "json")
    assert post(stack, "load", lora_name="desk", lora_path=path, load_inplace=True).status_code == 200
    assert models(stack)["desk"]["digest"] == adapter_digest(BUNDLED / "adapters" / "json")
    assert stack.ask("desk", QUESTION).startswith('{"subject"')
    status, said = refusal(stack, "load", lora_name="desk", lora_path="broken", load_inplace=True)
    assert (status, "adapter_model.safetensors" in said or "shape" in said) == (400, True), said
    assert stack.ask("desk", QUESTION).startswith('{"subject"'), "what served before still does"

    answer = post(stack, "unload", lora_name="desk")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'desk' removed successfully.")
    assert "desk" not in models(stack)
    assert refusal(stack, "unload", lora_name="desk") == (404, "The lora adapter 'desk' cannot be found.")
    assert not list((stack.folder / "manifests").glob("*.pushed.yaml"))


def copies(stack: LocalStack) -> set[Path]:
    return {one for one in (stack.data / "adapters").glob("*") if one.is_dir()}


def test_nothing_outside_of_the_folders_is_read(stack: LocalStack) -> None:
    before = copies(stack)
    for path in (str(stack.folder / "elsewhere" / "oneword"), "../elsewhere/oneword"):
        assert refusal(stack, "load", lora_name="out", lora_path=path)[0] == 400
    for path in ("link", "linked", "none"):
        status, said = refusal(stack, "load", lora_name="out", lora_path=path)
        assert (status, "leads out of" in said or "There is no folder" in said) == (404, True), said
    assert "out" not in models(stack)
    assert copies(stack) == before


def test_what_a_manifest_declares_is_neither_replaced_nor_removed(stack: LocalStack) -> None:
    status, said = refusal(stack, "load", lora_name="shouting", lora_path="pirate", load_inplace=True)
    assert (status, "is declared at" in said) == (400, True), said
    status, said = refusal(stack, "unload", lora_name="shouting")
    assert (status, "Remove it there." in said) == (400, True), said
    assert "shouting" in models(stack)


def test_one_name_at_once_from_many_clients(stack: LocalStack) -> None:
    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(post, stack, "load", lora_name="many", lora_path="pirate") for _ in range(4)]
        assert sorted(one.result().status_code for one in asked) == [200, 400, 400, 400]
    assert "Arr" in stack.ask("many", QUESTION)
    assert post(stack, "unload", lora_name="many").status_code == 200
