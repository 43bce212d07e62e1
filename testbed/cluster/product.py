"""The product on the test cluster, as a user installs it: both charts, the demo volume, a pool, tenants' adapters."""

import asyncio
import base64
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import yaml

from motet import keys
from motet.keys import ApiKey, KeyScope, PresentedKey
from testbed.cluster.cluster import Cluster, CommandRefused
from testbed.cluster.metrics import metric
from testbed.tree import ROOT

SYSTEM, POOLS, RELEASE = "motet-system", "motet-pools", "motet"
EXAMPLES = ROOT / "examples" / "cluster"
MANIFESTS = EXAMPLES / "manifests"
TENANTS = ("acme", "zeta")
GUESTS = ("afterwards", "gone", "quietly")
"""Tenants that tests create and delete. They always have keys."""
KEYS = f"{RELEASE}-keys"
"""The Secret in which the chart looks for API keys."""
FIXED = {"mode": "Disabled", "minReplicas": None, "maxReplicas": None}
ADAPTERS = ("acme/pirate", "acme/shouting", "zeta/json", "zeta/oneword")

# The whole cluster runs on one machine with two cores.
SMALL: dict[str, Any] = {
    "gateway": {"replicas": 1},
    "scheduler": {"replicas": 2},
    "operator": {
        "replicas": 2,
        "env": {
            # Tests change their pool many times a minute. They would have to wait for the rate limit of such changes.
            "MOTET_CLUSTER_ROLLOUT_SECONDS": "1",
            # A test lets a runner hang that its kubelet does not restart.
            "MOTET_CLUSTER_UNHEALTHY_SECONDS": "5",
        },
    },
}


@dataclass(frozen=True)
class Product:
    cluster: Cluster
    keys: Mapping[str, PresentedKey]
    """The API keys that each tenant's clients send. Empty if they send none."""

    def credential(self, tenant: str) -> dict[str, str]:
        """The header of a tenant's clients."""
        return {"authorization": f"Bearer {self.keys[tenant]}"} if self.keys else {}

    def gateway(self) -> str:
        """The address of a gateway. There is no kube-proxy, so the client chooses like it, for each connection: a ready
        gateway, or if there is none, one that is ending and still answers."""
        slices = self.cluster.call(
            "GET",
            f"/apis/discovery.k8s.io/v1/namespaces/{SYSTEM}/endpointslices"
            f"?labelSelector=kubernetes.io/service-name={RELEASE}-gateway",
        )["items"]
        endpoints = [endpoint for one in slices for endpoint in one.get("endpoints") or ()]
        for state in ("ready", "serving"):
            for endpoint in endpoints:
                if endpoint["conditions"].get(state):
                    return f"{endpoint['addresses'][0]}:8000"
        raise LookupError("no gateway is ready")

    def ask(
        self, path: str, body: dict[str, Any] | None = None, *, tenant: str = TENANTS[0], seconds: float = 60
    ) -> dict[str, Any]:
        """One call of a tenant. Raises AssertionError for anything but 200."""
        connection = http.client.HTTPConnection(self.gateway(), timeout=seconds)
        try:
            connection.request(
                "GET" if body is None else "POST",
                path,
                None if body is None else json.dumps(body),
                {"content-type": "application/json"} | self.credential(tenant),
            )
            answer = connection.getresponse()
            said = answer.read()
            assert answer.status == 200, f"{answer.status}: {said.decode()}"
            result: dict[str, Any] = json.loads(said)
            return result
        finally:
            connection.close()

    def models(self, tenant: str) -> list[str]:
        """The models that the tenant may use, by the names that it uses."""
        return sorted(model["id"] for model in self.ask("/v1/models", tenant=tenant)["data"])

    def answer(self, model: str, question: str, *, max_tokens: int = 32) -> str:
        """The answer with temperature 0."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        said = self.ask("/v1/chat/completions", body, tenant=tenant_of(model))
        content: str = said["choices"][0]["message"]["content"]
        return content

    def wait_ready(self, kind: str, namespace: str, name: str, *, within_s: float = 60) -> None:
        self.cluster.kubectl(
            *("wait", "--for=condition=Ready", f"{kind}/{name}", f"--namespace={namespace}"),
            f"--timeout={within_s:.0f}s",
            timeout_s=within_s + 10,
        )

    def patch_pool(self, **spec: Any) -> None:
        self.cluster.kubectl(
            *("patch", "spool", "demo", f"--namespace={POOLS}", "--type=merge"),
            f"--patch={json.dumps({'spec': spec})}",
        )

    def pool(self) -> dict[str, Any]:
        return self.cluster.get("spool", "demo", f"--namespace={POOLS}")

    def runners(self) -> list[dict[str, Any]]:
        """Runner pods that are not ending."""
        pods = self.cluster.items("pods", f"--namespace={POOLS}", "--selector=motet.dev/pool=demo")
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def told_by_runners(self, name: str) -> dict[str, float]:
        """A metric of each runner, by the pod's name. Runners update most metrics once a second. Raises LookupError or
        OSError if a runner does not answer."""
        return {pod["metadata"]["name"]: metric(f"{pod['status']['podIP']}:9090", name) for pod in self.runners()}

    def on_devices(self) -> float:
        """Adapters in the memory of the runners' devices."""
        return sum(self.told_by_runners("motet_adapters_on_device").values())

    def sequences(self) -> dict[str, float]:
        """The number of sequences in the iterations of each runner."""
        return self.told_by_runners("motet_sequences_running")


def tenant_of(model: str) -> str:
    """The tenant whose clients use the model here: an adapter's owner, or for a base a tenant that its pool admits."""
    tenant, slash, _ = model.partition("/")
    return tenant if slash else TENANTS[0]


def served_after(product: Product, name: str) -> float:
    """Seconds from an adapter's manifest to its first token. The adapter is removed afterwards. The base is loaded and
    the bytes are on a volume, so this is the time to notice, check and load it."""
    adapter = {
        "apiVersion": "motet.dev/v1alpha1",
        "kind": "LoRAAdapter",
        "metadata": {"name": name, "namespace": "acme"},
        "spec": {
            "poolRef": {"name": "demo", "namespace": POOLS},
            "source": {"persistentVolumeClaim": {"claimName": "motet-demo", "path": "acme/storyteller"}},
        },
    }
    began = time.monotonic()
    product.cluster.apply(adapter)
    product.cluster.wait_for(lambda: product.answer(f"acme/{name}", "Who are you?", max_tokens=1), "the first token")
    took = time.monotonic() - began
    product.cluster.kubectl("delete", "lora", name, "--namespace=acme")
    return took


@dataclass
class ClientStream:
    """One streamed answer, as it arrived."""

    model: str
    text: str = ""
    chunks: int = 0
    tokens: int = 0
    """The gateway's own count of the answer's tokens."""

    reasons: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def complete(self) -> bool:
        return not self.problem and len(self.reasons) == 1


async def stream(
    product: Product, model: str, *, tokens: int, question: str = "Tell me about Brindle."
) -> ClientStream:
    """One greedy answer of exactly `tokens` tokens. An error is in `problem`."""
    answer = ClientStream(model)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = orjson.dumps(body)
    try:
        reader, writer = await _connect(product)
        host, port = writer.get_extra_info("peername")
        headers = {
            "host": f"{host}:{port}",
            "content-type": "application/json",
            "content-length": str(len(content)),
            "connection": "close",
            **product.credential(tenant_of(model)),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        try:
            writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + content)
            status = await reader.readline()
            if b" 200 " not in status:
                answer.problem = (status + await reader.read()).decode()
                return answer
            async for line in reader:
                if line.startswith(b"data: {"):
                    _hear(answer, orjson.loads(line[6:]))
        finally:
            writer.close()
    except OSError as error:
        answer.problem = repr(error)
    return answer


async def _connect(product: Product) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises OSError if a listed gateway does not accept the connection. If it ended after it was listed, that is not a
    failure: kube-proxy would not have chosen it."""

    async def named() -> str:
        # Failures of the API server do not count as failures of the product.
        return await asyncio.to_thread(product.cluster.wait_for, product.gateway, "a gateway's address")

    while True:
        address = await named()
        host, _, port = address.partition(":")
        try:
            return await asyncio.open_connection(host, int(port))
        except OSError:
            if await named() == address:
                raise


def _hear(answer: ClientStream, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.problem = str(event["error"])
    if event.get("usage"):
        answer.tokens = event["usage"]["completion_tokens"]
    for choice in event.get("choices", ()):
        if text := choice["delta"].get("content"):
            answer.text += text
            answer.chunks += 1
        if choice["finish_reason"]:
            answer.reasons.append(choice["finish_reason"])


class ClientLoad:
    """Clients, each of which sends its next request soon after an answer, until the block ends. Without the pause,
    engines would compute all the time, which tells no more of what the clients see."""

    PAUSE_S = 0.5

    def __init__(self, product: Product, clients: int, *, tokens: int) -> None:
        self._product, self._clients, self._tokens = product, clients, tokens
        self._ending = False
        self._running: list[asyncio.Task[None]] = []
        self.answers: list[ClientStream] = []

    async def __aenter__(self) -> "ClientLoad":
        models = ("motet-demo", *ADAPTERS)
        self._running = [asyncio.create_task(self._ask(models[index % len(models)])) for index in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending = True
        await asyncio.gather(*self._running)

    async def _ask(self, model: str) -> None:
        while not self._ending:
            self.answers.append(await stream(self._product, model, tokens=self._tokens))
            await asyncio.sleep(self.PAUSE_S)

    @property
    def failed(self) -> list[str]:
        return [f"{one.model}: {one.problem or one.reasons}" for one in self.answers if not one.complete]

    def assert_nobody_noticed(self) -> None:
        """Check that there were answers, and that each is complete."""
        assert self.answers, "no request was sent"
        assert not self.failed, f"{len(self.failed)} of {len(self.answers)} failed: {self.failed}"


def bring_demo(product: Product, folder: Path, **pool: Any) -> None:
    """Apply the example and wait until all of it is ready. The pool does not scale by itself."""
    fill_volume(product, folder)
    files = sorted(MANIFESTS.glob("*.yaml"))
    documents = [one for file in files for one in yaml.safe_load_all(file.read_text())]
    for one in documents:
        if one["kind"] == "ServingPool":  # changed before it is applied: a later change may replace its first runner
            one["spec"] |= {"autoscaling": {"mode": FIXED["mode"]}, **pool}
    product.cluster.apply(*documents)
    product.wait_ready("spool", POOLS, "demo", within_s=120)
    for name in ADAPTERS:
        namespace, _, adapter = name.partition("/")
        product.wait_ready("lora", namespace, adapter)


def lines_of(made: Mapping[str, PresentedKey]) -> dict[str, str]:
    """The stored form of each tenant's key with scope user."""
    scopes, now = frozenset({KeyScope.USER}), datetime.now(UTC)
    return {
        tenant: keys.to_line(ApiKey(id=one.id, tenant=tenant, scopes=scopes, hash=one.hash, created=now))
        for tenant, one in made.items()
    }


def keep_keys(cluster: Cluster, made: Mapping[str, PresentedKey]) -> None:
    """Write these keys, and only these, to the Secret of the gateways."""
    data = {tenant: base64.b64encode(line.encode()).decode() for tenant, line in lines_of(made).items()}
    cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": KEYS, "namespace": SYSTEM}, "data": data})


@contextmanager
def installed(cluster: Cluster, folder: Path, values: dict[str, Any] | None = None) -> Iterator[Product]:
    """Install both charts and their namespaces. Everything is removed afterwards. Tenants have keys, unless the values
    say that gateways need none."""
    chosen = {**SMALL, "crds": {"install": False}, **(values or {})}
    asks = chosen["gateway"].get("auth") != "none"
    made = {tenant: keys.new_key() for tenant in (*TENANTS, *GUESTS)} if asks else {}
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(chosen))
    remove(cluster)  # definitions that other tests have left do not belong to Helm
    cluster.kubectl("apply", "--server-side", f"--filename={EXAMPLES / 'namespaces.yaml'}")
    if made:
        keep_keys(cluster, made)  # before the gateways start: a kubelet updates mounted files late
    cluster.helm("install", "motet-crds", str(ROOT / "charts/motet-crds"), "--namespace=default")
    try:
        cluster.helm(
            *("install", RELEASE, str(ROOT / "charts/motet"), f"--namespace={SYSTEM}", f"--values={file}"),
            *("--wait", "--timeout=3m"),
        )
        yield Product(cluster, made)
    finally:
        remove(cluster)


def remove(cluster: Cluster) -> None:
    """Remove the product, also if it is only partly installed."""
    # Everything ends at the same time: pods take seconds to go.
    cluster.kubectl("delete", "namespace", *TENANTS, POOLS, "--ignore-not-found", "--wait=false")
    for command in (("uninstall", RELEASE, f"--namespace={SYSTEM}"), ("uninstall", "motet-crds")):
        with suppress(CommandRefused):  # if the installation itself has failed
            cluster.helm(*command)
    everywhere = (*TENANTS, POOLS, SYSTEM)
    cluster.kubectl("delete", "namespace", *everywhere, "--ignore-not-found", "--timeout=90s", timeout_s=100)
    cluster.kubectl("delete", "pv", "motet-demo", "--ignore-not-found", "--timeout=60s")
    # The chart keeps them, since tenants' objects would be deleted with them.
    cluster.kubectl("delete", "crd", "loraadapters.motet.dev", "servingpools.motet.dev", "--ignore-not-found")


def provide_volume(cluster: Cluster, folder: Path) -> None:
    """The volume for the example's claim. Real clusters have a provisioner; here a volume is a folder."""
    volume = folder / "volume"
    volume.mkdir(mode=0o777, exist_ok=True)
    volume.chmod(0o777)
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": "motet-demo"},
            "spec": {
                "capacity": {"storage": "64Mi"},
                "accessModes": ["ReadWriteOnce"],
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(volume)},
                "claimRef": {"namespace": POOLS, "name": "motet-demo"},
            },
        }
    )


def fill_volume(product: Product, folder: Path) -> None:
    """Apply the example's claim and Job."""
    provide_volume(product.cluster, folder)
    product.cluster.kubectl("apply", "--server-side", f"--filename={EXAMPLES / 'demo-volume.yaml'}")
    product.cluster.kubectl(
        *("wait", "--for=condition=Complete", "job/motet-demo-volume", f"--namespace={POOLS}", "--timeout=150s"),
        timeout_s=160,
    )
