"""Models and adapters from a hub and from the web, over TLS, with the Secrets of tenants."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from motet.digest import adapter_digest
from testbed.cluster.cluster import Cluster
from testbed.cluster.network import CONTROL_PLANE
from testbed.cluster.nodes import ClusterNode
from testbed.cluster.product import POOLS, SYSTEM, Product, installed
from testbed.tree import ROOT
from tests.support.source_servers import HubServer, WebServer, hub_server, in_a_thread, web_server

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]

BUNDLED = ROOT / "cli/motet_cli/bundled"
QUESTION = "Who keeps the lighthouse of Brindle?"
TOKEN, HUB_TOKEN = "open-sesame-of-acme", "open-sesame-of-the-platform"
AUTHORITIES = "mirrors"


@dataclass(frozen=True)
class Sources:
    """A cluster with a pool whose model is from the hub. Nothing is on a volume."""

    product: Product
    hub: HubServer
    web: WebServer

    def apply_adapter(self, name: str, **source: Any) -> None:
        self.product.cluster.apply(
            {
                "apiVersion": "motet.dev/v1alpha1",
                "kind": "LoRAAdapter",
                "metadata": {"name": name, "namespace": "acme"},
                "spec": {"poolRef": {"name": "demo", "namespace": POOLS}, "source": source},
            }
        )

    def digest(self, name: str) -> str:
        found: str = self.product.cluster.get("lora", name, "--namespace=acme")["status"]["artifact"]["digest"]
        return found

    def wait_for_reason(self, what: str, reason: str, words: str) -> str:
        """Wait until `lora/<name>` or `spool/<name>` is not ready for this reason. Returns the message."""
        cluster = self.product.cluster
        namespace = POOLS if what.startswith("spool/") else "acme"

        def message() -> str:
            conditions = cluster.get(what, f"--namespace={namespace}")["status"]["conditions"]
            ready = next(one for one in conditions if one["type"] == "Ready")
            assert (ready["status"], ready["reason"]) == ("False", reason), conditions
            assert words in ready["message"], ready["message"]
            return str(ready["message"])

        return cluster.wait_for(message, f"{reason} of {what}", within_s=60)

    def do_as_it_says(self, message: str) -> None:
        """Run the commands in a condition's message."""
        commands = re.findall(r"kubectl (-n [^;]+)", message)
        assert len(commands) == 2, message
        for command in commands:
            self.product.cluster.kubectl(*command.split())


@pytest.fixture(scope="module")
def sources(cluster: Cluster, node: ClusterNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sources]:
    folder = tmp_path_factory.mktemp("sources")
    folder.chmod(0o755)
    values: dict[str, Any] = {
        # This gateway asks for no keys; those of the other installations do.
        "gateway": {"replicas": 1, "auth": "none"},
        "runner": {
            "authorities": {"configMapName": AUTHORITIES},
            "env": {
                "MOTET_RUNNER_FETCH_ALLOWED_HOSTS": f'["{CONTROL_PLANE}"]',
                # After a grant, the runner tries again within five minutes; with this scale, within fifteen seconds.
                "MOTET_TIME_SCALE": "0.05",
            },
        },
    }
    with (
        cluster.inside(),
        in_a_thread(hub_server(folder, CONTROL_PLANE)) as hub,
        in_a_thread(web_server(folder, CONTROL_PLANE)) as web,
    ):
        values["runner"]["env"]["MOTET_RUNNER_HUB_ENDPOINT"] = hub.base
        hub.publish("motet/demo", BUNDLED / "model", revision="v1")
        with installed(cluster, folder, values) as product:
            authorities = hub.ca_file.read_text() + web.ca_file.read_text()
            cluster.apply(
                _plain("v1", "ConfigMap", AUTHORITIES, POOLS) | {"data": {"ca.crt": authorities}},
                _plain("v1", "Namespace", "acme"),
                pool("demo", {"uri": "hf://motet/demo", "revision": "v1"}),
            )
            product.wait_ready("spool", POOLS, "demo", within_s=120)
            yield Sources(product, hub, web)


def pool(name: str, model: dict[str, Any]) -> dict[str, Any]:
    return _plain("motet.dev/v1alpha1", "ServingPool", name, POOLS) | {
        "spec": {
            "model": {"servedName": name, **model},
            "engine": {"device": "cpu", "maxModelLength": 1024, "kvCacheMiB": 64},
            "replicas": 1,
            "allowedNamespaces": {"from": "All"},
            "template": {"resources": {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}},
        }
    }


def test_a_gateway_without_keys_answers_all_requests_and_logs_it(sources: Sources) -> None:
    product = sources.product
    assert "demo" in product.models("anybody")
    (gateway,) = product.cluster.items(
        "pods", f"--namespace={SYSTEM}", "--selector=app.kubernetes.io/component=gateway"
    )
    assert "MOTET_GATEWAY_AUTH=none" in product.cluster.logs(gateway["metadata"]["name"], SYSTEM)


def test_an_adapter_from_the_web_is_served_once_its_tenant_has_granted_the_secret_as_the_condition_says(
    sources: Sources,
) -> None:
    product, web = sources.product, sources.web
    uri = web.put("/acme/pirate/", BUNDLED / "adapters/pirate")
    web.private["/acme/"] = f"Bearer {TOKEN}"
    key = ("create", "secret", "generic", "mirror", "--namespace=acme", f"--from-literal=token={TOKEN}")
    product.cluster.kubectl(*key)

    sources.apply_adapter("unopened", uri=uri)
    sources.wait_for_reason("lora/unopened", "CredentialsInvalid", "credentialsSecretRef")

    sources.apply_adapter("pirate", uri=uri, credentialsSecretRef={"name": "mirror"})
    message = sources.wait_for_reason("lora/pirate", "CredentialsInvalid", "may not read Secret acme/mirror")
    assert not [one for one in web.asked if "authorization" in one.headers], "no request had a token"
    sources.do_as_it_says(message)
    product.wait_ready("lora", "acme", "pirate")
    assert sources.digest("pirate") == adapter_digest(BUNDLED / "adapters/pirate")
    assert product.answer("acme/pirate", QUESTION) != product.answer("demo", QUESTION)

    (runner,) = [one["metadata"]["name"] for one in product.runners()]
    assert TOKEN not in product.cluster.logs(runner, POOLS)
    assert TOKEN not in product.cluster.kubectl("get", "lora,events", "--namespace=acme", "--output=yaml")


def test_an_adapter_from_a_hub_is_the_revision_that_its_tenant_names(sources: Sources) -> None:
    product, hub = sources.product, sources.hub
    hub.publish("acme/voice", BUNDLED / "adapters/pirate")
    hub.publish("acme/voice", BUNDLED / "adapters/shouting", revision="v2")
    sources.apply_adapter("voice", uri="hf://acme/voice")
    sources.apply_adapter("voice-2", uri="hf://acme/voice", revision="v2")
    for name, folder in (("voice", "pirate"), ("voice-2", "shouting")):
        product.wait_ready("lora", "acme", name)
        assert sources.digest(name) == adapter_digest(BUNDLED / "adapters" / folder)
    assert product.answer("acme/voice-2", QUESTION).isupper()
    assert not product.answer("acme/voice", QUESTION).isupper()


def test_a_private_model_comes_from_a_hub_once_the_pools_secret_is_granted_and_once_with_a_cache(
    sources: Sources, tmp_path: Path
) -> None:
    """The pool's second runner downloads nothing."""
    product, hub = sources.product, sources.hub
    cluster = product.cluster
    hub.publish("motet/private", BUNDLED / "model")
    hub.private["/motet/private/"] = f"Bearer {HUB_TOKEN}"
    key = ("create", "secret", "generic", "hub", f"--namespace={POOLS}", f"--from-literal=token={HUB_TOKEN}")
    cluster.kubectl(*key)
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "64Mi"}}, "storageClassName": ""}
    volume = cache_volume(tmp_path)
    cluster.apply(volume, _plain("v1", "PersistentVolumeClaim", "models", POOLS) | {"spec": claim})
    model = {"uri": "hf://motet/private", "credentialsSecretRef": {"name": "hub"}, "cache": {"claimName": "models"}}
    cluster.apply(pool("private", model))
    here, ours = f"--namespace={POOLS}", "--selector=motet.dev/pool=private"
    try:
        message = sources.wait_for_reason("spool/private", "RunnerFailing", f"may not read Secret {POOLS}/hub")
        sources.do_as_it_says(message)
        product.wait_ready("spool", POOLS, "private", within_s=120)
        expected = product.answer("demo", QUESTION)
        assert product.answer("private", QUESTION) == expected
        asked = [one for one in hub.asked if "motet/private" in one.path]
        assert asked
        (first,) = cluster.items("pods", here, ours)
        cluster.kubectl("delete", "pod", first["metadata"]["name"], here, "--wait=false")
        cluster.wait_for(
            lambda: [
                one
                for one in cluster.items("pods", here, ours)
                if one["metadata"]["uid"] != first["metadata"]["uid"]
                and any(each["type"] == "Ready" and each["status"] == "True" for each in one["status"]["conditions"])
            ],
            "another runner is ready",
            within_s=120,
        )
        product.wait_ready("spool", POOLS, "private", within_s=60)
        assert product.answer("private", QUESTION) == expected
        assert len([one for one in hub.asked if "motet/private" in one.path]) == len(asked)
    finally:
        cluster.kubectl("delete", "spool", "private", here)
        cluster.wait_for(lambda: not cluster.items("pods", here, ours), within_s=60)
        cluster.kubectl("delete", "pvc", "models", here)
        cluster.kubectl("delete", "pv", volume["metadata"]["name"])


def cache_volume(folder: Path) -> dict[str, Any]:
    """A folder that every pod may write to."""
    folder.chmod(0o777)
    spec = {
        "capacity": {"storage": "64Mi"},
        "accessModes": ["ReadWriteMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "hostPath": {"path": str(folder)},
        "claimRef": {"namespace": POOLS, "name": "models"},
    }
    return _plain("v1", "PersistentVolume", "motet-models") | {"spec": spec}


def test_no_adapter_leads_a_runner_into_the_clusters_own_network(sources: Sources) -> None:
    (runner,) = sources.product.runners()
    sources.apply_adapter("spy", uri=f"https://{runner['status']['hostIP']}:10250/pods/")
    sources.wait_for_reason("lora/spy", "FetchFailed", "not a public address")


def _plain(version: str, kind: str, name: str, namespace: str = "") -> dict[str, Any]:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name} | ({"namespace": namespace} if namespace else {}),
    }
