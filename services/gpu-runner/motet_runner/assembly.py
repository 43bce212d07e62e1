"""Puts a runner together once its engine has loaded: for its process, and for simulations of it."""

from motet.api.v1 import common_pb2
from motet.domain import Digest
from motet.settings import Addresses
from motet.surroundings import Surroundings
from motet_runner.accepted_requests import AcceptedRequests
from motet_runner.adapters.adapter_files import AdapterFiles
from motet_runner.adapters.kept_proofs import ProofKey
from motet_runner.adapters.policy.eviction import CacheLimits
from motet_runner.adapters.registry import AdapterRegistry
from motet_runner.hang_detector import HangDetector
from motet_runner.interface import EngineInfo
from motet_runner.loaded_runner import LoadedRunner, RunningEngine
from motet_runner.metrics import Metrics
from motet_runner.plan import preset_named
from motet_runner.runner_facts import RunnerFacts
from motet_runner.settings import Settings


def new_identity(settings: Settings, surroundings: Surroundings) -> common_pb2.RunnerIdentity:
    """Of a runner that starts now."""
    return common_pb2.RunnerIdentity(
        pool=settings.pool,
        group=settings.served_group,
        revision=settings.revision,
        instance=settings.instance,
        incarnation=surroundings.new_id(8),
        pod_name=settings.pod_name,
        pod_uid=settings.pod_uid,
    )


def assemble(
    settings: Settings,
    addresses: Addresses,
    *,
    identity: common_pb2.RunnerIdentity,
    model: str,
    base: Digest,
    assets: Digest,
    info: EngineInfo,
    engine: RunningEngine,
    files: AdapterFiles,
    accepted: AcceptedRequests,
    metrics: Metrics,
    hang_detector: HangDetector,
    surroundings: Surroundings,
    time_scale: float = 1.0,
) -> LoadedRunner:
    """`model`: the base model's name in metrics. `base`, `assets`: its digest, and that of its assets."""
    adapters = AdapterRegistry(
        files,
        limits=CacheLimits(settings.max_cached_adapters, settings.adapter_disk_bytes),
        users_of=accepted.users_of,
        post=engine.post,
        metrics=metrics,
        surroundings=surroundings,
        time_scale=time_scale,
        slab_bytes=info.slab_bytes,
        proves_with=info.kernels.serving if info.kernels is not None else None,
        proves_linears=info.proves,
        build=ProofKey.of(info, base).build_name if info.proves else "",
    )
    rule = preset_named(settings.preset, contiguous=settings.contiguous).promise
    return LoadedRunner(
        facts=RunnerFacts(identity, settings.reachable_at, info, base, assets, rule, settings.promise_quantile),
        model=model,
        engine=engine,
        adapters=adapters,
        accepted=accepted,
        settings=settings,
        addresses=addresses,
        metrics=metrics,
        hang_detector=hang_detector,
        surroundings=surroundings,
        time_scale=time_scale,
    )
