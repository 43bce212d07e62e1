"""Names: who may say which, and what they mean."""

import pytest

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.errors import InvalidRequest, ModelNotFound, Overloaded
from motet_gateway.catalog import Catalog, CatalogBook
from motet_gateway.identity.caller import ANYBODY, Caller

ACME = Caller(tenant="acme", sees_all=False)


def group(name: str, served: str) -> scheduler_pb2.CatalogGroup:
    return scheduler_pb2.CatalogGroup(group=f"platform/{name}", served_name=served, pools=[f"platform/{name}"])


def adapter(tenant: str, name: str, pool: str = "small", model_name: str = "") -> scheduler_pb2.CatalogAdapter:
    return scheduler_pb2.CatalogAdapter(
        ref=common_pb2.AdapterRef(namespace=tenant, name=name, generation=1),
        group=f"platform/{pool}",
        model_name=model_name or name,
        digest=f"sha256:{tenant}-{name}-{pool}",
    )


CATALOG = Catalog(
    (group("small", "tiny-1b"), group("large", "huge-70b")),
    (
        adapter("default", "legal"),
        adapter("default", "polite"),
        adapter("default", "polite-large", "large", model_name="polite"),
        adapter("acme", "legal"),
        adapter("acme", "sql"),
        adapter("acme", "twice"),
        adapter("acme", "twice-large", "large", model_name="twice"),
    ),
)


def meaning(name: str, caller: Caller = ANYBODY) -> str:
    target = CATALOG.resolve(name, caller)
    return target.adapter_digest or target.group.served_name


@pytest.mark.parametrize(
    ("name", "caller", "digest"),
    [
        ("tiny-1b", ANYBODY, "tiny-1b"),
        ("legal", ANYBODY, "sha256:default-legal-small"),
        ("legal", ACME, "sha256:acme-legal-small"),
        ("acme/legal", ANYBODY, "sha256:acme-legal-small"),
        ("acme/legal", ACME, "sha256:acme-legal-small"),
        ("default/legal", ANYBODY, "sha256:default-legal-small"),
        ("small:legal", ANYBODY, "sha256:default-legal-small"),
        ("platform/small:sql", ACME, "sha256:acme-sql-small"),
        ("tiny-1b:sql", ACME, "sha256:acme-sql-small"),
        ("large:acme/twice", ANYBODY, "sha256:acme-twice-large-large"),
        ("large:twice", ACME, "sha256:acme-twice-large-large"),
        ("small:polite", ANYBODY, "sha256:default-polite-small"),
        ("large:polite", ANYBODY, "sha256:default-polite-large-large"),
    ],
)
def test_a_name_means_one_adapter(name: str, caller: Caller, digest: str) -> None:
    assert meaning(name, caller) == digest


def test_a_tenant_never_learns_anothers_names() -> None:
    for name in ("default/legal", "polite", "large:polite"):
        with pytest.raises(ModelNotFound) as caught:
            CATALOG.resolve(name, ACME)
        assert "default" not in caught.value.message.replace(f"'{name}'", "")
        assert "polite" not in caught.value.message.replace(f"'{name}'", "")


def test_a_name_on_two_pools_has_to_say_which() -> None:
    with pytest.raises(InvalidRequest, match="'small:polite' or 'large:polite'"):
        CATALOG.resolve("polite", ANYBODY)


def test_every_listed_name_resolves_to_what_is_listed() -> None:
    for caller in (ANYBODY, ACME):
        for name, target in CATALOG.visible(caller):
            assert CATALOG.resolve(name, caller) == target


def test_a_wrong_name_is_answered_with_the_three_nearest() -> None:
    with pytest.raises(ModelNotFound, match=r"Nearest names: legal, acme/legal, large:polite\."):
        CATALOG.resolve("leagl", ANYBODY)


def test_an_empty_catalog_says_so() -> None:
    with pytest.raises(ModelNotFound, match="No model is served here yet"):
        Catalog().resolve("x", ANYBODY)


def test_before_the_first_catalog_nobody_is_told_that_a_model_does_not_exist() -> None:
    with pytest.raises(Overloaded):
        _ = CatalogBook().current
