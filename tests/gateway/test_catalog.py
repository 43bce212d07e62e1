"""Names of models: which tenant may use which, and what they mean."""

import contextlib
import gc
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.errors import InvalidRequest, ModelNotFound, MotetError, Overloaded
from motet_gateway.catalog import Catalog, CurrentCatalog
from motet_gateway.identity.caller import ANONYMOUS, Caller

ACME, ZETA = Caller("acme"), Caller("zeta")


def group(
    name: str, served: str, *, namespace: str = "platform", tenants: Sequence[str] = ("*",)
) -> scheduler_pb2.CatalogGroup:
    full = f"{namespace}/{name}"
    return scheduler_pb2.CatalogGroup(group=full, served_name=served, pools=[full], tenants=tenants)


def adapter(
    tenant: str, name: str, pool: str = "small", model_name: str = "", share: Sequence[str] = ()
) -> scheduler_pb2.CatalogAdapter:
    return scheduler_pb2.CatalogAdapter(
        ref=common_pb2.AdapterRef(namespace=tenant, name=name, generation=1),
        group=pool if "/" in pool else f"platform/{pool}",
        model_name=model_name or name,
        share=share,
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


def meaning(name: str, caller: Caller = ANONYMOUS) -> str:
    target = CATALOG.resolve(name, caller)
    return target.adapter_digest or target.group.served_name


@pytest.mark.parametrize(
    ("name", "caller", "digest"),
    [
        ("tiny-1b", ANONYMOUS, "tiny-1b"),
        ("legal", ANONYMOUS, "sha256:default-legal-small"),
        ("legal", ACME, "sha256:acme-legal-small"),
        ("acme/legal", ANONYMOUS, "sha256:acme-legal-small"),
        ("acme/legal", ACME, "sha256:acme-legal-small"),
        ("default/legal", ANONYMOUS, "sha256:default-legal-small"),
        ("small:legal", ANONYMOUS, "sha256:default-legal-small"),
        ("platform/small:sql", ACME, "sha256:acme-sql-small"),
        ("tiny-1b:sql", ACME, "sha256:acme-sql-small"),
        ("large:acme/twice", ANONYMOUS, "sha256:acme-twice-large-large"),
        ("large:twice", ACME, "sha256:acme-twice-large-large"),
        ("small:polite", ANONYMOUS, "sha256:default-polite-small"),
        ("large:polite", ANONYMOUS, "sha256:default-polite-large-large"),
    ],
)
def test_a_name_resolves_to_one_adapter(name: str, caller: Caller, digest: str) -> None:
    assert meaning(name, caller) == digest


def test_a_tenant_never_learns_anothers_names() -> None:
    for name in ("default/legal", "polite", "large:polite"):
        with pytest.raises(ModelNotFound) as caught:
            CATALOG.resolve(name, ACME)
        assert "default" not in caught.value.message.replace(f"'{name}'", "")
        assert "polite" not in caught.value.message.replace(f"'{name}'", "")


def test_a_name_on_two_pools_needs_the_pool() -> None:
    with pytest.raises(InvalidRequest, match="'small:polite' or 'large:polite'"):
        CATALOG.resolve("polite", ANONYMOUS)


def test_every_listed_name_resolves_to_what_is_listed() -> None:
    for caller in (ANONYMOUS, ACME):
        for name, target in CATALOG.visible(caller):
            assert CATALOG.resolve(name, caller) == target


def test_a_wrong_name_is_answered_with_the_three_nearest() -> None:
    with pytest.raises(ModelNotFound, match=r"Nearest names: legal, acme/legal, large:polite\."):
        CATALOG.resolve("leagl", ANONYMOUS)


def test_the_error_for_an_empty_catalog_says_that_it_is_empty() -> None:
    with pytest.raises(ModelNotFound, match="No model is served here yet"):
        Catalog().resolve("x", ANONYMOUS)


def test_changes_replace_add_and_remove_adapters_and_keep_the_order_of_the_others() -> None:
    before = Catalog(
        (group("small", "tiny-1b"),), (adapter("a", "x"), adapter("a", "y"), adapter("b", "x")), {"a": "1"}, (3, 7)
    )
    groups, changed = [group("small", "tiny-2b")], [adapter("a", "z"), adapter("a", "x", share=["b"])]
    removed = [common_pb2.AdapterRef(namespace="a", name="y"), common_pb2.AdapterRef(namespace="a", name="never")]
    changes = scheduler_pb2.CatalogChanges(
        term=4, revision=8, before_term=3, before=7, groups=groups, adapters=changed, removed=removed
    )
    now = before.changed(changes)
    assert now == Catalog(tuple(groups), (changed[1], adapter("b", "x"), changed[0]), {"a": "1"}, (4, 8))
    assert now.resolve("a/z", Caller("", sees_all=True)).group.served_name == "tiny-2b"
    with pytest.raises(InvalidRequest, match=r"changes of catalog \(3, 7\), but this gateway has \(4, 8\)"):
        now.changed(changes)


def test_of_changes_that_come_one_by_one_each_looks_at_no_other_adapter() -> None:
    looks = []

    class Looked:
        def __init__(self, name: str) -> None:
            self._ref = common_pb2.AdapterRef(namespace="a", name=name)

        @property
        def ref(self) -> common_pb2.AdapterRef:
            looks.append(self._ref.name)
            return self._ref

    catalog = Catalog(adapters=cast("tuple[scheduler_pb2.CatalogAdapter, ...]", (Looked("x"), Looked("y"))))
    for number in range(1, 4):
        changes = scheduler_pb2.CatalogChanges(before=number - 1, revision=number, adapters=[adapter("b", f"{number}")])
        catalog = catalog.changed(changes)
    assert len(catalog.adapters) == 5
    assert sorted(looks) == ["x", "x", "y", "y"]  # the namespace and the name, once


def test_before_the_first_catalog_no_model_counts_as_missing() -> None:
    with pytest.raises(Overloaded):
        _ = CurrentCatalog().current


# ------------------------------------------------------------------------------------------------------------- sharing


def seen(catalog: Catalog, caller: Caller) -> set[str]:
    return {name for name, _ in catalog.visible(caller)}


def of_acme(*share: str, admits: Sequence[str] = ("*",)) -> Catalog:
    return Catalog((group("small", "base", tenants=admits),), (adapter("acme", "legal", share=share),))


@pytest.mark.parametrize(
    ("catalog", "caller", "names"),
    [
        (of_acme(), ACME, {"base", "legal"}),
        (of_acme(), ZETA, {"base"}),
        (of_acme("zeta"), ZETA, {"base", "acme/legal"}),
        (of_acme("zeta"), Caller("beta"), {"base"}),
        (of_acme("*"), Caller("beta"), {"base", "acme/legal"}),
        (of_acme("zeta", admits=["acme", "zeta"]), ZETA, {"base", "acme/legal"}),
        # It is never shared with a tenant that the pool does not admit.
        (of_acme("zeta", admits=["acme"]), ZETA, set()),
        (of_acme("*", admits=["acme"]), ZETA, set()),
        # From an operator that does not send it: a tenant's own adapter is served, otherwise it would not be listed.
        (of_acme("*", admits=[]), ZETA, set()),
        (of_acme(admits=[]), ACME, {"legal"}),
        (of_acme(admits=[]), ANONYMOUS, {"base", "acme/legal"}),
    ],
)
def test_a_caller_may_use_own_and_shared_adapters_of_allowed_models(
    catalog: Catalog, caller: Caller, names: set[str]
) -> None:
    assert seen(catalog, caller) == names
    for name in ("base", "legal", "acme/legal", "small:legal", "small:acme/legal"):
        short = name.rpartition(":")[2]
        usable = short in names or (short == "acme/legal" and caller == ACME)
        if usable:
            assert catalog.resolve(name, caller).group.served_name == "base"
        else:
            with pytest.raises(ModelNotFound):
                catalog.resolve(name, caller)


def test_a_name_that_another_shares_does_not_hide_ones_own() -> None:
    catalog = Catalog(
        (group("small", "base"),), (adapter("acme", "legal", share=["zeta"]), adapter("zeta", "legal", share=["acme"]))
    )
    for caller in (ACME, ZETA):
        assert catalog.resolve("legal", caller).adapter_name == f"{caller.tenant}/legal"
    assert seen(catalog, ACME) == {"base", "legal", "zeta/legal"}


def test_a_forbidden_base_model_hides_no_adapter_of_the_same_name() -> None:
    groups = (group("first", "base", tenants=["zeta"]), group("second", "base", tenants=["acme"]))
    catalog = Catalog(groups, (adapter("acme", "other", "first", model_name="base-2"),))
    assert catalog.resolve("base", ACME).group.group == "platform/second"
    assert catalog.resolve("base", ZETA).group.group == "platform/first"
    hidden = Catalog((group("small", "legal", tenants=["zeta"]),), (adapter("acme", "legal"),))
    assert hidden.resolve("legal", ACME).adapter_name == "acme/legal"
    assert seen(hidden, ACME) == {"legal"}


def test_a_name_on_two_pools_counts_only_on_allowed_pools() -> None:
    both = (adapter("acme", "a", "small", "legal", ["zeta"]), adapter("acme", "b", "large", "legal"))
    catalog = Catalog((group("small", "tiny-1b"), group("large", "huge-70b")), both)
    assert catalog.resolve("acme/legal", ZETA).group.group == "platform/small"
    with pytest.raises(InvalidRequest, match="small:legal"):
        catalog.resolve("legal", ACME)


def test_pools_with_one_name_in_two_namespaces_differ() -> None:
    groups = (group("small", "tiny-1b"), group("small", "other-1b", namespace="labs"))
    catalog = Catalog(groups, (adapter("acme", "a", "small", "legal"), adapter("acme", "b", "labs/small", "legal")))
    assert {"platform/small:legal", "labs/small:legal"} < seen(catalog, ACME)
    assert catalog.resolve("labs/small:legal", ACME).adapter_name == "acme/b"
    with pytest.raises(InvalidRequest, match="'platform/small:legal' or 'labs/small:legal'"):
        catalog.resolve("legal", ACME)


def test_a_forbidden_name_takes_as_many_steps_as_an_unknown_one() -> None:
    """Calls of functions are counted, since a clock shows no hundredth. Two are the look at the grants."""
    theirs = [adapter("acme", f"customer-{number:04}") for number in range(2000)]
    catalog = Catalog((group("small", "base"),), (*theirs, adapter("zeta", "own")))

    def steps(name: str) -> int:
        calls: list[str] = []
        gc.disable()  # what is collected may have functions to be called
        sys.setprofile(lambda _frame, event, _argument: calls.append(event))
        try:
            with contextlib.suppress(ModelNotFound):
                catalog.resolve(name, ZETA)
        finally:
            sys.setprofile(None)
            gc.enable()
        return len(calls)

    steps("acme/customer-0")  # what is computed once
    for forbidden, unknown in (
        ("acme/customer-1234", "acme/customer-9234"),
        ("acme/customer-0017", "acme/customer-x017"),
    ):
        assert abs(steps(forbidden) / steps(unknown) - 1) < 0.01


def test_suggestions_from_shared_names_are_cached_once_for_all_tenants() -> None:
    shared = [adapter(f"t{number % 50}", f"customer-{number:04}", share=["*"]) for number in range(2000)]
    other = adapter("acme", "customer-0000", share=["t1"])
    catalog = Catalog((group("small", "base"),), (*shared, other))

    def error_for(tenant: str) -> str:
        with pytest.raises(ModelNotFound) as caught:
            catalog.resolve("acme/customer-000", Caller(tenant))
        return caught.value.message.partition("Nearest names: ")[2]

    error_for("t0")  # the shared cache is filled now
    tracemalloc.start()
    try:
        answers = {number: error_for(f"t{number}") for number in range(1, 49)}
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept / len(answers) < 30_000  # 2000 names would take ten times as long
    assert "acme/customer-0000" in answers.pop(1), "which is shared with it"
    assert not [answer for answer in answers.values() if "acme/customer-0000" in answer]


TENANTS = ("acme", "zeta", "beta")
NAMES = ("legal", "legall", "sql", "base")
POOLS = ("small", "large")


@dataclass(frozen=True)
class CatalogCase:
    catalog: Catalog
    without: Catalog
    """The same catalog without everything that the caller may not use."""
    caller: Caller


_listed = st.one_of(st.just(("*",)), st.lists(st.sampled_from(TENANTS), max_size=2, unique=True))


@st.composite
def catalog_cases(draw: st.DrawFn) -> CatalogCase:
    caller = Caller(draw(st.sampled_from(TENANTS)))
    groups = [group(name, draw(st.sampled_from(("base", "acme/legal", name))), tenants=draw(_listed)) for name in POOLS]
    keys = draw(st.lists(st.tuples(*map(st.sampled_from, (TENANTS, NAMES, POOLS))), max_size=8, unique=True))
    adapters = [
        adapter(tenant, f"{name}-{pool}", pool, model_name=name, share=draw(_listed)) for tenant, name, pool in keys
    ]
    admitted = {one.group: set(one.tenants) & {caller.tenant, "*"} for one in groups}
    ours = [
        one
        for one in adapters
        if one.ref.namespace == caller.tenant or (set(one.share) & {caller.tenant, "*"} and admitted[one.group])
    ]
    used = {one.group for one in ours}
    left = [one for one in groups if admitted[one.group] or one.group in used]
    return CatalogCase(Catalog(tuple(groups), tuple(adapters)), Catalog(tuple(left), tuple(ours)), caller)


def asked_for() -> st.SearchStrategy[str]:
    part = st.sampled_from([*TENANTS, *NAMES, *POOLS, "leg", "platform", ""])
    return st.lists(st.tuples(part, st.sampled_from(["", "/", ":", "x"])), max_size=4).map(
        lambda pieces: "".join(piece for pair in pieces for piece in pair)
    )


def outcome(catalog: Catalog, name: str, caller: Caller) -> tuple[object, ...]:
    try:
        target = catalog.resolve(name, caller)
    except MotetError as error:
        return type(error), error.message, error.param
    return target.group.group, target.adapter_name


@given(catalog_cases(), asked_for())
def test_a_forbidden_model_looks_like_an_unknown_one(case: CatalogCase, name: str) -> None:
    assert outcome(case.catalog, name, case.caller) == outcome(case.without, name, case.caller)
    assert seen(case.catalog, case.caller) == seen(case.without, case.caller)


@given(catalog_cases())
def test_each_listed_name_resolves_to_the_listed_model(case: CatalogCase) -> None:
    listed = list(case.catalog.visible(case.caller))
    assert len({name for name, _ in listed}) == len(listed)
    for name, target in listed:
        assert case.catalog.resolve(name, case.caller) == target


def test_an_adapter_that_is_not_yet_checked_for_its_groups_new_base_model_has_the_tokenizer_of_the_old_one() -> None:
    small = group("small", "tiny-1b")
    small.base_digest, small.asset_digest = "sha256:new", "sha256:new-assets"
    old, new = adapter("acme", "old"), adapter("acme", "new")
    old.base_digest, old.asset_digest = "sha256:old", "sha256:old-assets"
    catalog = Catalog((small,), (old, new))
    found = {name: catalog.resolve(name, ACME) for name in ("old", "new", "tiny-1b")}
    assert {name: (target.base_digest, target.asset_digest) for name, target in found.items()} == {
        "old": ("sha256:old", "sha256:old-assets"),
        "new": ("sha256:new", "sha256:new-assets"),
        "tiny-1b": ("sha256:new", "sha256:new-assets"),
    }
    assert found["old"].weights == ("sha256:old", "sha256:acme-old-small")
