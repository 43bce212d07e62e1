"""API keys on a cluster, from the Secret that the chart's gateways mount."""

from collections.abc import Callable

import pytest

from motet import keys
from motet.keys import PresentedKey
from testbed.cluster.product import KEYS, SYSTEM, Product, keep_keys
from tests.kube.releases.installed.steps import QUESTION

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]


def sending(product: Product, key: PresentedKey) -> Product:
    """All clients of this product send this key."""
    return Product(product.cluster, dict.fromkeys(product.keys, key))


def refusal_of(call: Callable[[], object]) -> str:
    """The message of a refused call; empty if it succeeds."""
    try:
        call()
    except AssertionError as refusal:
        return str(refusal)
    return ""


def is_let_in(product: Product) -> bool:
    refusal = refusal_of(lambda: product.models("acme"))
    assert not refusal or refusal.startswith("401: "), refusal
    return not refusal


def test_a_request_without_a_stored_key_is_refused(product: Product) -> None:
    with pytest.raises(AssertionError, match=r"401: .*This gateway needs an API key"):
        Product(product.cluster, {}).models("acme")
    with pytest.raises(AssertionError, match=r"401: .*This gateway does not know this API key"):
        sending(product, keys.new_key()).models("acme")


def test_before_the_first_key_a_gateway_is_ready_and_refuses_all_requests(product: Product) -> None:
    """The state after an installation, without the Secret."""
    cluster, here = product.cluster, f"--namespace={SYSTEM}"
    gateways = ("pods", here, "--selector=app.kubernetes.io/component=gateway")

    def is_ready() -> bool:
        (pod,) = cluster.items(*gateways)
        (ready,) = [one["status"] for one in pod["status"]["conditions"] if one["type"] == "Ready"]
        return ready == "True" and product.gateway() == f"{pod['status']['podIP']}:8000"

    cluster.kubectl("delete", "secret", KEYS, here)
    try:
        cluster.kubectl("delete", *gateways)
        cluster.wait_for(is_ready, "a gateway that has never known a key")
        assert refusal_of(lambda: Product(cluster, {}).models("acme")).startswith("401: ")
        assert not is_let_in(product)
    finally:
        keep_keys(cluster, product.keys)
    cluster.wait_for(lambda: is_let_in(product), "the first keys to open")


def test_each_tenant_has_its_own_names_and_the_base(product: Product) -> None:
    names = {"acme": ["motet-demo", "pirate", "shouting"], "zeta": ["json", "motet-demo", "oneword"]}
    # A gateway may still know adapters that earlier tests have deleted.
    product.cluster.wait_for(lambda: {tenant: product.models(tenant) for tenant in names} == names, "those names")
    body = {"prompt": QUESTION, "max_tokens": 8, "temperature": 0}
    own, long = (product.ask("/v1/completions", body | {"model": name}) for name in ("pirate", "acme/pirate"))
    assert own["choices"] == long["choices"]


def test_another_tenants_adapter_looks_missing_until_it_is_shared(product: Product) -> None:
    def is_missing(model: str) -> bool:
        body = {"model": model, "prompt": "Ahoy", "max_tokens": 1}
        said = refusal_of(lambda: product.ask("/v1/completions", body, tenant="zeta"))
        return said.startswith("404: ") and f"The model '{model}' does not exist or you may not use it." in said

    def share(*namespaces: str) -> None:
        adapter = "/apis/motet.dev/v1alpha1/namespaces/acme/loraadapters/pirate"
        product.cluster.call("PATCH", adapter, {"spec": {"share": namespaces}})

    assert is_missing("acme/parrot")
    assert is_missing("acme/pirate")
    share("zeta")
    try:
        product.cluster.wait_for(lambda: "acme/pirate" in product.models("zeta"), "the adapter that is shared")
        assert not is_missing("acme/pirate")
        assert is_missing("pirate"), "the short name is its owner's"
    finally:
        share()
    product.cluster.wait_for(lambda: is_missing("acme/pirate"), "the end of the share")


def test_a_key_is_valid_while_it_is_in_the_secret(product: Product) -> None:
    second = keys.new_key()
    other = sending(product, second)
    assert not is_let_in(other)
    keep_keys(product.cluster, {**product.keys, "acme": second})
    try:
        product.cluster.wait_for(lambda: is_let_in(other), "the new key to open")
        assert "pirate" in other.models("acme")
        assert not is_let_in(product), "its line is gone"
    finally:
        keep_keys(product.cluster, product.keys)
    product.cluster.wait_for(lambda: is_let_in(product) and not is_let_in(other), "the first key alone to be valid")
