"""The catalog of a simulated cluster: one pool, and adapters that were checked before."""

from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256

from motet.domain import Digest
from motet_scheduler.policy.adapters.adapter import Revision
from motet_scheduler.policy.catalog import SavedAdapter, SavedCatalog
from motet_scheduler.policy.values import AdapterRef, AdapterSpec, Certificate, PoolSpec, RevisionKey, ScalingMode
from motet_simulator.plan.setup import GROUP, Setup


def catalog(digests: Mapping[str, Digest], setup: Setup) -> SavedCatalog:
    scaling = ScalingMode.BUILTIN if setup.shrinks else ScalingMode.DISABLED
    pool = PoolSpec(pool=GROUP, group=GROUP, served_name="plan", replicas=setup.runners, scaling=scaling)
    return SavedCatalog(
        pools=(pool,), adapters=tuple(_saved(name, digest, setup.rank) for name, digest in digests.items())
    )


@lru_cache(maxsize=100_000)
def digest_of(name: str) -> Digest:
    return Digest("sha256:" + sha256(name.encode()).hexdigest())


def object_name(adapter: str) -> str:
    return adapter if not adapter or "/" in adapter else f"default/{adapter}"


@lru_cache(maxsize=100_000)
def _saved(name: str, digest: Digest, rank: int) -> SavedAdapter:
    """As certified. The same in each simulation of a plan."""
    namespace, _, own = object_name(name).partition("/")
    source = f"file:///{name}"
    spec = AdapterSpec(
        ref=AdapterRef(namespace, own, 1), group=GROUP, model_name=own, revision=RevisionKey(source=source)
    )
    serving = Revision(
        key=RevisionKey(source=source, group=GROUP),
        digest=digest,
        certificate=Certificate(digest=digest, rank=rank),
    )
    return SavedAdapter(spec=spec, serving=serving)
