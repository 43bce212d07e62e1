"""The catalog of the scheduler's benchmarks: 1,000 adapters of 100 tenants on one pool."""

from dataclasses import replace

from motet.domain import Digest
from motet.runner_info import RunnerIdentity
from motet_scheduler.policy.adapters.adapter import Revision
from motet_scheduler.policy.catalog import SavedAdapter, SavedCatalog
from motet_scheduler.policy.values import AdapterRef, AdapterSpec, GroupName, PoolSpec, RevisionKey

ADAPTERS, TENANTS = 1_000, 100
GROUP = GroupName("default/demo")


def digest_of(adapter: int) -> Digest:
    return Digest(f"sha256:{adapter:064}")


def saved(adapter: int, tenant: str = "") -> SavedAdapter:
    key = RevisionKey(source=f"file:///adapters/{adapter}")
    ref = AdapterRef(tenant or f"tenant-{adapter % TENANTS}", f"adapter-{adapter}", 1)
    spec = AdapterSpec(ref=ref, group=GROUP, model_name=ref.name, revision=key)
    return SavedAdapter(spec=spec, serving=Revision(key=replace(key, group=GROUP), digest=digest_of(adapter)))


CATALOG = SavedCatalog(
    pools=(PoolSpec(pool="default/demo", group=GROUP, served_name="demo"),),
    adapters=tuple(saved(adapter) for adapter in range(ADAPTERS)),
)


def with_tenant_of_many(tenant: str, adapters: range) -> SavedCatalog:
    """Beside the others."""
    return replace(CATALOG, adapters=(*CATALOG.adapters, *(saved(adapter, tenant) for adapter in adapters)))


def identity(index: int) -> RunnerIdentity:
    return RunnerIdentity(instance=f"r{index}", incarnation="1", pool="default/demo", group=GROUP)
