"""A stack that fetches its model and adapters from a hub and the web, with the tenants' own Secrets."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from testbed.local_stack import BUNDLED, LocalStack, running_stack
from tests.support.registry_server import registry_server
from tests.support.s3_server import s3_server
from tests.support.source_servers import HubServer, hub_server, in_a_thread, web_server

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
  adapterVolumes: [{{claimName: shared, subPath: adapters, allowedNamespaces: {{from: All}}}}]
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
apiVersion: motet.dev/v1alpha1
kind: LoRAAdapter
metadata: {{name: storyteller, namespace: acme}}
spec:
  poolRef: {{name: demo, namespace: default}}
  source: {{uri: "{bucket}", credentialsSecretRef: {{name: bucket}}}}
---
apiVersion: motet.dev/v1alpha1
kind: LoRAAdapter
metadata: {{name: json, namespace: acme}}
spec:
  poolRef: {{name: demo, namespace: default}}
  source: {{image: "{image}", credentialsSecretRef: {{name: registry}}}}
---
apiVersion: v1
kind: Secret
metadata: {{name: registry, namespace: acme}}
type: kubernetes.io/dockerconfigjson
stringData: {{.dockerconfigjson: '{{"auths": {{"{registry}": {{"username": "me", "password": "{canary}"}}}}}}'}}
---
apiVersion: v1
kind: Secret
metadata: {{name: key, namespace: acme}}
stringData: {{token: {canary}}}
---
apiVersion: v1
kind: Secret
metadata: {{name: bucket, namespace: acme}}
stringData: {{AWS_ACCESS_KEY_ID: AKIAEXAMPLE, AWS_SECRET_ACCESS_KEY: {canary}, AWS_REGION: eu-west-1}}
"""


NAMED = """---
apiVersion: motet.dev/v1alpha1
kind: LoRAAdapter
metadata: {{name: {name}, namespace: acme}}
spec:
  poolRef: {{name: demo, namespace: default}}
  source: {{persistentVolumeClaim: {{claimName: shared, path: {path}}}}}
"""
ON_A_VOLUME = {"own": "acme/pirate", "others": "zeta/json", "linked": "acme/borrowed"}


@dataclass
class Deployed:
    stack: LocalStack
    hub: HubServer
    apply: Callable[[str], None]
    """Write the manifests. The argument goes into the source of the adapter that needs a token."""


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """A stack with a model from a hub, and adapters from the hub, the web, a bucket, a registry and a volume."""
    folder = tmp_path_factory.mktemp("sources")
    with (
        in_a_thread(hub_server(folder)) as hub,
        in_a_thread(web_server(folder)) as web,
        in_a_thread(s3_server(folder)) as store,
        in_a_thread(registry_server(folder)) as registry,
    ):
        hub.publish("motet/demo", BUNDLED / "model", revision="v1")
        hub.publish("motet/shouting", BUNDLED / "adapters/shouting")
        source = web.put("/pirate/", BUNDLED / "adapters/pirate")
        web.authorization = f"Bearer {CANARY}"
        trusted = folder / "both.pem"
        trusted.write_bytes(b"".join(server.ca_file.read_bytes() for server in (hub, web, store, registry)))
        bucket = store.publish("adapters", "acme/storyteller", BUNDLED / "adapters/storyteller")
        store.keys["AKIAEXAMPLE"], store.region = CANARY, "eu-west-1"
        artifact = registry.publish("acme/json", "v1", BUNDLED / "adapters/json")
        image = f"{artifact}@{registry.digest('acme/json', 'v1')}".removeprefix("oci://")
        registry.users["me"] = CANARY
        manifests = folder / "manifests"
        adapters = manifests / "volumes/shared/adapters"
        shutil.copytree(BUNDLED / "adapters/pirate", adapters / "acme/pirate")
        shutil.copytree(BUNDLED / "adapters/json", adapters / "zeta/json")
        (adapters / "acme/borrowed").symlink_to("../zeta/json")

        def apply(opener: str) -> None:
            text = MANIFESTS.format(
                web=source, bucket=bucket, opener=opener, canary=CANARY, image=image, registry=registry.host
            )
            text += "".join(NAMED.format(name=name, path=path) for name, path in ON_A_VOLUME.items())
            (folder / "all.yaml").write_text(text)
            shutil.move(folder / "all.yaml", manifests / "all.yaml")

        apply("")
        env = {
            "MOTET_RUNNER_HUB_ENDPOINT": hub.base,
            "MOTET_RUNNER_S3_ENDPOINT": store.base,
            "MOTET_RUNNER_FETCH_CA_FILE": str(trusted),
            "MOTET_RUNNER_FETCH_ALLOWED_HOSTS": '["127.0.0.1"]',
        }
        with running_stack(folder, manifests=manifests, env=env) as stack:
            yield Deployed(stack, hub, apply)


def test_a_model_and_adapters_from_every_source_with_a_tenants_secrets(deployed: Deployed) -> None:
    stack = deployed.stack
    assert stack.ask("acme/shouting", QUESTION).isupper()
    stack.until(lambda: _reason(stack, "pirate") == "CredentialsInvalid")
    deployed.apply(", credentialsSecretRef: {name: key}")
    stack.until(lambda: stack.adapter("pirate")["ready"])
    for name in ("json", "storyteller"):
        stack.until(lambda name=name: stack.adapter(name)["ready"])
    names = ("json", "pirate", "shouting", "storyteller")
    assert len({stack.ask(f"acme/{name}", QUESTION) for name in names}) == len(names)
    files_with_token = [
        path for path in stack.data.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()
    ]
    assert not files_with_token
    assert len(deployed.hub.asked_for("/model.safetensors")) == 2, "one HEAD and one GET"


def test_a_local_tenant_reads_only_its_own_folder_of_a_shared_volume(deployed: Deployed) -> None:
    stack = deployed.stack
    stack.until(lambda: stack.adapter("own")["ready"])
    stack.until(lambda: _reason(stack, "linked") == "FetchFailed")
    assert "leads out of the folder acme of its volume" in _condition(stack, "linked", "ArtifactReady")["message"]
    refused = _condition(stack, "others", "Accepted")
    assert (refused["status"], refused["reason"]) == ("False", "PolicyDenied")
    assert "only from the folder acme of volume shared" in refused["message"]
    with stack.openai() as client:
        assert "acme/others" not in {model.id for model in client.models.list()}


def _condition(stack: LocalStack, name: str, condition: str) -> dict[str, str]:
    conditions: dict[str, dict[str, str]] = {one["type"]: one for one in stack.adapter(name)["conditions"]}
    return conditions[condition]


def _reason(stack: LocalStack, name: str) -> str:
    return _condition(stack, name, "ArtifactReady")["reason"]
