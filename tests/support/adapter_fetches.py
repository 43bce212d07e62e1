"""A runner's adapters without an engine: for tests of what is fetched."""

from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2
from motet.domain import Digest
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.checks import Checks
from motet_runner.adapters.disk_patience import DiskPatience
from motet_runner.adapters.policy.values import FetchRequest, Held
from motet_runner.adapters.registry import AdapterRegistry
from motet_runner.metrics import Metrics
from motet_runner.sources.source_access import Sources


class Fetcher:
    def __init__(self, cache: DiskCache, sources: Sources | None = None, patience: DiskPatience | None = None) -> None:
        self.registry = AdapterRegistry(
            cache,
            checks=Checks(cache, _no_check, base_digest=Digest("")),
            capacity=1000,
            users_of=lambda _: 0,
            post=lambda _: None,
            metrics=Metrics(CollectorRegistry()),
            sources=sources,
            patience=patience,
        )

    @property
    def copies(self) -> int:
        return self.registry.copies

    async def fetch(self, request: FetchRequest, *, manifest: str = "a") -> Held:
        ref = common_pb2.AdapterRef(namespace=request.namespace, name=manifest)
        life = await self.registry.order(request, ref, check=False)
        assert life.held is not None
        return replace(life.held, stamp=None)


def _no_check(folder: Path) -> Certification:
    raise AssertionError(f"nobody has ordered a check of {folder}")
