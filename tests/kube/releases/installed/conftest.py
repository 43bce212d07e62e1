"""One installation of the product, which all tests of this folder share. A test undoes its changes.

The files run in the order of their names. The test that counts permissions is last: by then all have been used.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from testbed.cluster.cluster import Cluster
from testbed.cluster.nodes import ClusterNode
from testbed.cluster.product import Product, bring_demo, installed
from tests.kube.releases.installed.steps import wait_for_one_runner


@pytest.fixture(scope="package")
def product(cluster: Cluster, node: ClusterNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    folder = tmp_path_factory.mktemp("product")
    folder.chmod(0o755)
    with cluster.inside(), installed(cluster, folder) as running:
        bring_demo(running, folder, drainTimeoutSeconds=2)
        adapters = folder / "volume" / "adapters"
        widen(adapters / "acme" / "storyteller", adapters / "acme" / "wide", rank=128)
        (adapters / "acme" / "borrowed").symlink_to("../zeta/json")
        yield running


@pytest.fixture
def two_runners(product: Product) -> Iterator[list[str]]:
    """The names of two runner pods. Afterwards there is one again."""
    product.patch_pool(replicas=2)
    product.cluster.wait_for(lambda: product.pool()["status"]["readyReplicas"] == 2, "two runners", within_s=120)
    yield [pod["metadata"]["name"] for pod in product.runners()]
    product.patch_pool(replicas=1)
    wait_for_one_runner(product)


def widen(source: Path, target: Path, *, rank: int) -> None:
    """The same adapter with a higher rank: the additional weights are zero."""
    target.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | {"r": rank}))
    more = rank - config["r"]
    wide = {
        name: pad(tensor, (0, 0, 0, more) if "lora_A" in name else (0, more))
        for name, tensor in load_file(source / "adapter_model.safetensors").items()
    }
    save_file(wide, target / "adapter_model.safetensors")
    for path in (target, *target.iterdir()):
        path.chmod(0o755)  # for the user of the runners
