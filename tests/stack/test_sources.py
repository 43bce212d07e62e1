"""A stack whose model and adapters come from elsewhere: from a hub and the web, with the tenants' own Secrets."""

import shutil
from pathlib import Path

import pytest

from tests.stack.harness import BUNDLED, Stack, running_stack
from tests.support.sources import hub_server, in_a_thread, web_server

pytestmark = pytest.mark.stack

QUESTION = "Who rules Harrow?"
CANARY = "canary-5e2b41"

MANIFESTS = """
apiVersion: motet.dev/v1alpha1
kind: ServingPool
metadata: {{name: demo, namespace: default}}
spec:
  model: {{uri: "hf://motet/demo", revision: v1, servedName: demo}}
  engine: {{kvCacheMiB: 64}}
  allowedNamespaces: {{from: All}}
---
apiVersion: motet.dev/v1alpha1
kind: LoRAAdapter
metadata: {{name: pirate, namespace: acme}}
spec:
  poolRef: {{name: demo, namespace: default}}
  source: {{uri: "{web}"{opener}}}
---
apiVersion: motet.dev/v1alpha1
kind: LoRAAdapter
metadata: {{name: shouting, namespace: acme}}
spec:
  poolRef: {{name: demo, namespace: default}}
  source: {{uri: "hf://motet/shouting"}}
---
apiVersion: v1
kind: Secret
metadata: {{name: key, namespace: acme}}
stringData: {{token: {canary}}}
"""


def test_a_model_and_adapters_from_a_hub_and_the_web_with_a_tenants_secret(tmp_path: Path) -> None:
    with in_a_thread(hub_server(tmp_path)) as hub, in_a_thread(web_server(tmp_path)) as web:
        hub.publish("motet/demo", BUNDLED / "model", revision="v1")
        hub.publish("motet/shouting", BUNDLED / "adapters/shouting")
        source = web.put("/pirate/", BUNDLED / "adapters/pirate")
        web.authorization = f"Bearer {CANARY}"
        trusted = tmp_path / "both.pem"
        trusted.write_bytes(hub.ca_file.read_bytes() + web.ca_file.read_bytes())
        manifests = tmp_path / "manifests"
        manifests.mkdir()

        def apply(opener: str) -> None:
            text = MANIFESTS.format(web=source, opener=opener, canary=CANARY)
            (tmp_path / "all.yaml").write_text(text)
            shutil.move(tmp_path / "all.yaml", manifests / "all.yaml")

        apply("")
        env = {
            "MOTET_RUNNER_HUB_ENDPOINT": hub.base,
            "MOTET_RUNNER_FETCH_CA_FILE": str(trusted),
            "MOTET_RUNNER_FETCH_ALLOWED_HOSTS": '["127.0.0.1"]',
        }
        with running_stack(tmp_path, manifests=manifests, env=env) as stack:
            assert stack.ask("acme/shouting", QUESTION).isupper()
            stack.until(lambda: _reason(stack, "pirate") == "CredentialsInvalid")
            apply(", credentialsSecretRef: {name: key}")
            stack.until(lambda: stack.adapter("pirate")["ready"])
            assert stack.ask("acme/pirate", QUESTION) != stack.ask("acme/shouting", QUESTION)
            told = [path for path in stack.data.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
            assert not told
            assert len(hub.asked_for("/model.safetensors")) == 2, "its head and its bytes, once"


SHARED = """
apiVersion: motet.dev/v1alpha1
kind: ServingPool
metadata: {name: demo, namespace: default}
spec:
  model: {uri: "file://MODEL", servedName: demo}
  engine: {kvCacheMiB: 64}
  allowedNamespaces: {from: All}
  adapterVolumes: [{claimName: shared, subPath: adapters, allowedNamespaces: {from: All}}]
"""
NAMED = """---
apiVersion: motet.dev/v1alpha1
kind: LoRAAdapter
metadata: {{name: {name}, namespace: acme}}
spec:
  poolRef: {{name: demo, namespace: default}}
  source: {{persistentVolumeClaim: {{claimName: shared, path: {path}}}}}
"""


def test_on_a_laptop_too_a_tenant_reads_its_own_folder_of_a_shared_volume(tmp_path: Path) -> None:
    adapters = tmp_path / "manifests/volumes/shared/adapters"
    shutil.copytree(BUNDLED / "adapters/pirate", adapters / "acme/pirate")
    shutil.copytree(BUNDLED / "adapters/json", adapters / "zeta/json")
    (adapters / "acme/borrowed").symlink_to("../zeta/json")
    named = {"own": "acme/pirate", "others": "zeta/json", "linked": "acme/borrowed"}
    (tmp_path / "manifests/all.yaml").write_text(
        SHARED.replace("MODEL", str(BUNDLED / "model"))
        + "".join(NAMED.format(name=name, path=path) for name, path in named.items())
    )
    with running_stack(tmp_path, manifests=tmp_path / "manifests") as stack:
        stack.until(lambda: stack.adapter("own")["ready"])
        stack.until(lambda: _reason(stack, "linked") == "FetchFailed")
        assert "leads out of the folder acme of its volume" in _said(stack, "linked", "ArtifactReady")["message"]
        refused = _said(stack, "others", "Accepted")
        assert (refused["status"], refused["reason"]) == ("False", "PolicyDenied")
        assert "from the folder acme of volume shared only" in refused["message"]
        assert "acme/others" not in {model.id for model in stack.openai().models.list()}


def _said(stack: Stack, name: str, condition: str) -> dict[str, str]:
    conditions: dict[str, dict[str, str]] = {one["type"]: one for one in stack.adapter(name)["conditions"]}
    return conditions[condition]


def _reason(stack: Stack, name: str) -> str:
    return _said(stack, name, "ArtifactReady")["reason"]
