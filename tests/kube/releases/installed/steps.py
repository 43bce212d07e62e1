"""Steps that several tests of this folder take."""

import shutil
from pathlib import Path

from testbed.cluster.product import POOLS, Product

QUESTION = "Who keeps the lighthouse of Brindle?"


def volume_of(product: Product) -> Path:
    return Path(product.cluster.get("pv", "motet-demo")["spec"]["hostPath"]["path"])


def bring_storyteller(product: Product, namespace: str) -> None:
    """Load a new tenant's adapter, with bytes that no other adapter has, onto a device."""
    adapters = volume_of(product) / "adapters"
    shutil.copytree(adapters / "acme" / "storyteller", adapters / namespace / "storyteller", dirs_exist_ok=True)
    product.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": {"motet.dev/tenant": "true"}},
        },
        {
            "apiVersion": "motet.dev/v1alpha1",
            "kind": "LoRAAdapter",
            "metadata": {"name": "storyteller", "namespace": namespace},
            "spec": {
                "poolRef": {"name": "demo", "namespace": POOLS},
                "source": {"persistentVolumeClaim": {"claimName": "motet-demo", "path": f"{namespace}/storyteller"}},
            },
        },
    )
    product.wait_ready("lora", namespace, "storyteller")
    product.answer(f"{namespace}/storyteller", QUESTION, max_tokens=1)


def wait_for_runners(product: Product, count: int) -> None:
    def there() -> bool:
        status = product.pool()["status"]
        return status["readyReplicas"] == count and len(product.runners()) == count

    product.cluster.wait_for(there, f"{count} runners", within_s=180)


def wait_for_one_runner(product: Product) -> None:
    """Wait until one runner is there, of the pool's newest revision: a test may have left a rollout."""

    def alone() -> bool:
        pool = product.pool()
        status = pool["status"]
        assert status["observedGeneration"] == pool["metadata"]["generation"]
        return status["currentRevision"] == status["updateRevision"] and len(product.runners()) == 1

    product.cluster.wait_for(alone, "one runner", within_s=180)
    product.wait_ready("spool", POOLS, "demo")


def wait_for_silence(product: Product) -> None:
    """Wait until no runner reports a stream. The reports are a moment late."""
    product.cluster.wait_for(lambda: not any(product.sequences().values()), "silence")


def wait_for_streams(product: Product, count: int = 1) -> dict[str, float]:
    """Wait until `count` streams have begun. Returns the number of each runner."""

    def begun() -> dict[str, float]:
        sequences = product.sequences()
        assert sum(sequences.values()) >= count, sequences
        return sequences

    return product.cluster.wait_for(begun, "the streams")
