"""The operator's stream to the scheduler: the whole catalog up, what became of it down."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from motet.api.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from motet.leadership import Leadership
from motet.model import ObjectName
from motet.rpc import Link
from motet_operator.reconcile import AdapterKnowledge, Advice, Catalog, Certificate, Drain, Residence

_CLASSES = {
    "Interactive": common_pb2.REQUEST_CLASS_INTERACTIVE,
    "Standard": common_pb2.REQUEST_CLASS_STANDARD,
    "Batch": common_pb2.REQUEST_CLASS_BATCH,
}
_SCALING = {
    "Disabled": scheduler_pb2.SCALING_MODE_DISABLED,
    "Builtin": scheduler_pb2.SCALING_MODE_BUILTIN,
    "External": scheduler_pb2.SCALING_MODE_EXTERNAL,
}
_TIERS = {
    common_pb2.MEMORY_TIER_DISK: "disk",
    common_pb2.MEMORY_TIER_HOST: "host",
    common_pb2.MEMORY_TIER_DEVICE: "device",
}


@dataclass(frozen=True, slots=True)
class Condemned:
    """A runner that the scheduler takes for dead."""

    incarnation: str
    why: str
    since: datetime


class SchedulerSync:
    """Keeps the scheduler told, and remembers what it last said. Snapshots only: they are small and cannot drift."""

    def __init__(
        self, address: str, changed: Callable[[], None], *, office: Callable[[], Leadership | None] = lambda: None
    ) -> None:
        """`office`: by which we lead, where operators elect a leader."""
        self.known: dict[ObjectName, AdapterKnowledge] = {}
        self.advice: dict[ObjectName, Advice] = {}
        self.drained: set[str] = set()
        self.condemned: dict[str, Condemned] = {}
        self.slots: dict[str, int] = {}
        """Places for adapters in device memory, by instance."""

        self._identities: dict[str, common_pb2.RunnerIdentity] = {}
        self._instances: frozenset[str] = frozenset()
        self._drains: dict[str, Drain] = {}
        self._catalog: Catalog | None = None
        self._revision = 0
        self._changed = changed
        self._office = office
        self._link: Link[scheduler_pb2.SyncUp, scheduler_pb2.SyncDown] = Link(
            "scheduler",
            address,
            lambda channel: scheduler_pb2_grpc.SchedulerStub(channel).Sync(),
            greet=self._greet,
            receive=self._receive,
            opened=changed,
            closed=lambda _: self._lost(),
        )

    async def run(self) -> None:
        await self._link.run()

    @property
    def connected(self) -> bool:
        return self._link.connected

    def tell(self, catalog: Catalog, drains: Iterable[Drain], instances: Iterable[str] = ()) -> None:
        """Say what should be. Says nothing when it is what was said last. `instances` are the runners that exist."""
        if catalog != self._catalog:
            self._catalog = catalog
            self._revision += 1
            kept = {adapter.name for adapter in catalog.adapters}
            self.known = {name: knowledge for name, knowledge in self.known.items() if name in kept}
            pools = {pool.pool for pool in catalog.pools}
            self.advice = {name: advice for name, advice in self.advice.items() if name in pools}
            self._link.send(self._snapshot())
        wanted = {drain.instance: drain for drain in drains}
        for drain in wanted.values():
            if drain.instance not in self._drains:
                self._link.send(self._drain(drain))
        self._drains = wanted
        self.drained &= wanted.keys()
        before, self._instances = self._instances, frozenset(instances)
        for instance in before - self._instances:
            self._forget(instance)

    def _forget(self, instance: str) -> None:
        self.condemned.pop(instance, None)
        self.slots.pop(instance, None)
        self._identities.pop(instance, None)

    def _greet(self) -> Iterable[scheduler_pb2.SyncUp]:
        # Before the manifests have been read there is nothing to say; an empty catalog would unload everything.
        if self._catalog is not None:
            yield self._snapshot()
        for drain in self._drains.values():
            yield self._drain(drain)

    def _snapshot(self) -> scheduler_pb2.SyncUp:
        assert self._catalog is not None
        return scheduler_pb2.SyncUp(
            term=self._term,
            snapshot=scheduler_pb2.CatalogSnapshot(
                revision=self._revision,
                pools=[
                    scheduler_pb2.PoolEntry(
                        pool=str(pool.pool),
                        group=str(pool.group),
                        served_name=pool.served_name,
                        model_uri=pool.model_uri,
                        replicas=pool.replicas,
                        max_sequences=pool.max_sequences,
                        scaling=_SCALING[pool.scaling],
                        min_replicas=pool.min_replicas,
                        max_replicas=pool.max_replicas or 0,
                        scale_down_stabilization_seconds=pool.scale_down_stabilization_seconds,
                    )
                    for pool in self._catalog.pools
                ],
                adapters=[
                    scheduler_pb2.AdapterEntry(
                        ref=common_pb2.AdapterRef(
                            namespace=adapter.name.namespace, name=adapter.name.name, generation=adapter.generation
                        ),
                        group=str(adapter.group),
                        model_name=adapter.model_name,
                        source=adapter.source,
                        expected_digest=adapter.expected_digest,
                        max_class=_CLASSES[adapter.max_class],
                        min_replicas=adapter.min_replicas,
                        max_replicas=adapter.max_replicas,
                        content_stamp=adapter.content_stamp,
                        revision=adapter.source_revision,
                        credentials=adapter.credentials,
                        max_bytes=adapter.max_bytes,
                    )
                    for adapter in self._catalog.adapters
                ],
            ),
        )

    def _drain(self, drain: Drain) -> scheduler_pb2.SyncUp:
        identity = self._identities.get(drain.instance) or common_pb2.RunnerIdentity(
            pool=str(drain.pool), revision=drain.revision, instance=drain.instance
        )
        left = (drain.deadline - datetime.now(UTC)).total_seconds()
        order = scheduler_pb2.DrainRunner(runner=identity, deadline_seconds=max(0.0, left))
        return scheduler_pb2.SyncUp(term=self._term, drain=order)

    def _receive(self, message: scheduler_pb2.SyncDown) -> None:
        match message.WhichOneof("message"):
            case "adapter":
                report = message.adapter
                self.known[ObjectName(report.ref.namespace, report.ref.name)] = _knowledge(report)
            case "desired":
                it = message.desired
                self.advice[ObjectName.parse(it.pool)] = Advice(
                    replicas=it.replicas, code=it.reason_code, reason=it.reason, stale=it.stale
                )
            case "outranked":
                self._assert(message.outranked.term)
                return
            case "drained":
                self.drained.add(message.drained.runner.instance)
            case "runner":
                if not self._hear_runner(message.runner):
                    return
            case _:
                return
        self._changed()

    @property
    def _term(self) -> int:
        office = self._office()
        return office.term if office is not None else 0

    def _assert(self, term: int) -> None:
        """Somebody has led in a later term: a successor of ours, or somebody of an earlier Lease that is gone."""
        office = self._office()
        if office is not None and term >= office.term:
            office.exceed(term)
            for message in self._greet():
                self._link.send(message)

    def _lost(self) -> None:
        """Nobody knows any more what is asked for: what was advised holds what there is, and takes nothing away."""
        self.advice = {
            name: replace(advice, stale=True, reason="the scheduler is away") for name, advice in self.advice.items()
        }
        self._changed()

    def _hear_runner(self, report: scheduler_pb2.RunnerReport) -> bool:
        """Whether something is to be done about a runner, or told of it."""
        identity = report.runner
        if not report.attached and identity.instance not in self._instances:
            self._forget(identity.instance)  # the last word on one that is gone
            return False
        self._identities[identity.instance] = identity
        slots = report.capacity.adapter_slots
        resized, self.slots[identity.instance] = slots != self.slots.get(identity.instance), slots
        before = self.condemned.get(identity.instance)
        if report.condemned and before is not None and before.incarnation == identity.incarnation:
            return resized  # also when its streams are given up at last: it hangs as before
        self.condemned.pop(identity.instance, None)
        # One whose streams were down first has died, as far as can be seen, and its successor may be loading.
        if report.condemned and report.attached:
            now = datetime.now(UTC)
            self.condemned[identity.instance] = Condemned(identity.incarnation, report.condemned, now)
            return True
        return before is not None or resized


def _knowledge(report: scheduler_pb2.AdapterReport) -> AdapterKnowledge:
    return AdapterKnowledge(
        generation=report.ref.generation,
        serving_digest=report.serving_digest,
        certificate=_certificate(report.certificate) if report.HasField("certificate") else None,
        failure_code=report.failure.code,
        failure_reason=report.failure.reason,
        failure_message=report.failure.message,
        failure_passes=report.failure.retry_after_seconds > 0,
        places=tuple(
            Residence(runner=place.instance, tier=_TIERS.get(place.tier, "unknown"), digest=place.digest)
            for place in sorted(report.places, key=lambda place: (place.instance, place.tier))
        ),
    )


def _certificate(it: scheduler_pb2.Certificate) -> Certificate:
    return Certificate(
        digest=it.digest,
        size_bytes=it.size_bytes,
        rank=it.rank,
        alpha=it.alpha,
        target_modules=tuple(it.target_modules),
        mapped=it.mapped,
        unmapped=tuple(it.unmapped),
        base_digest=it.base_digest,
        method=it.method,
    )
