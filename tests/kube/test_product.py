"""The product on a cluster: what tenants and platform teams see, with every part real but the machines."""

from collections.abc import Iterator

import pytest

from tests.kube.cluster import Cluster
from tests.kube.product import ADAPTERS, MANIFESTS, POOLS, SYSTEM, Product, fill_volume, installed

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]

QUESTION = "Who keeps the lighthouse of Brindle?"


@pytest.fixture(scope="module")
def product(cluster: Cluster, node: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    folder = tmp_path_factory.mktemp("product")
    folder.chmod(0o755)
    with cluster.inside(), installed(cluster, folder) as running:
        fill_volume(running, folder)
        cluster.kubectl("apply", "--server-side", f"--filename={MANIFESTS}")
        running.wait_ready("spool", POOLS, "demo", within_s=120)
        for name in ADAPTERS:
            namespace, _, adapter = name.partition("/")
            running.wait_ready("lora", namespace, adapter)
        yield running


def test_every_adapter_answers_in_its_own_voice(product: Product) -> None:
    answers = {name: product.answer(name, QUESTION) for name in ("motet-demo", *ADAPTERS)}
    assert len(set(answers.values())) == len(answers), answers


def test_kubectl_get_tells_the_story(product: Product) -> None:
    table = product.cluster.kubectl("get", "motet", "--all-namespaces")
    assert all(name.partition("/")[2] in table for name in ADAPTERS)
    (pool,) = [line.split() for line in table.splitlines() if line.startswith(POOLS)]
    assert pool[2:4] == ["True", "1/1"]


def test_nothing_is_written_when_nothing_changes(product: Product) -> None:
    import time

    assert product.cluster.audit_log is not None
    time.sleep(3)
    before = len(product.cluster.audit())
    time.sleep(10)
    fresh = product.cluster.audit()[before:]
    ours = f"system:serviceaccount:{SYSTEM}:"
    writes = [
        (entry["user"]["username"], entry["verb"], entry["requestURI"])
        for entry in fresh
        if entry["user"]["username"].startswith(ours)
        and entry["verb"] not in ("get", "list", "watch")
        and "/leases/" not in entry["requestURI"]
    ]
    assert writes == []
