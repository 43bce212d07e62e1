"""The operator's stream to the scheduler: sends the catalog and drains, receives reports."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

import structlog
from pydantic import ValidationError

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.domain import ObjectName
from motet.errors import reason_of
from motet.leadership import Leadership
from motet.resources.limits import Limits
from motet.resources.status import MAX_KERNELS, MAX_MODULES, MAX_WARNINGS, Artifact
from motet.rpc import Link
from motet.runner_info import BatchCap, KernelState
from motet.surroundings import Surroundings
from motet.terms import check_term
from motet.transport.methods import SYNC
from motet_operator.adapter_reports import AdapterReports
from motet_operator.awaited_reports import AWAITED_SECONDS, AwaitedReports
from motet_operator.reconcile import AdapterReplica, AdapterReport, CatalogSnapshot, RunnerDrain, ScalingAdvice

log = structlog.get_logger(__name__)

_AGREEMENTS: dict[str, Literal["Agree", "Differ"]] = {"Agree": "Agree", "Differ": "Differ"}
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


SentDrains = dict[str, tuple[str, datetime]]
"""Drains as last sent, by instance: incarnation (empty if unknown) and deadline."""


@dataclass(frozen=True, slots=True)
class UnhealthyRunner:
    """A runner that the scheduler considers dead."""

    incarnation: str
    why: str
    since: datetime


class SchedulerSync:
    """Sends the declared state to the scheduler and remembers its last reports. It sends whole snapshots: they are
    small, and both sides cannot drift apart."""

    def __init__(
        self,
        address: str,
        changed: Callable[[], None],
        *,
        surroundings: Surroundings,
        leadership: Callable[[], Leadership | None] = lambda: None,
        time_scale: float = 1.0,
    ) -> None:
        """`leadership` gives this operator's election, if operators elect a leader."""
        self.clock = surroundings.clock
        self._wall = surroundings.wall
        self._knowledge = AdapterReports()
        self.awaited = AwaitedReports(AWAITED_SECONDS * time_scale)
        self.advice: dict[ObjectName, ScalingAdvice] = {}
        self.drained: set[str] = set()
        self.attached: set[str] = set()
        """Runners that are connected to the scheduler, as it reported."""

        self.unhealthy: dict[str, UnhealthyRunner] = {}
        self.requests: dict[str, int] = {}
        """That each runner has, by instance. They change all the time, and are no reason for a round."""

        self.slots: dict[str, int] = {}
        """Adapter slots in device memory, by instance."""

        self.batch_caps: dict[str, BatchCap] = {}
        self.kernels: dict[str, KernelState] = {}
        """By instance."""

        self.identities: dict[str, common_pb2.RunnerIdentity] = {}
        self._instances: frozenset[str] = frozenset()
        self._drains: dict[str, RunnerDrain] = {}
        self._sent_drains: SentDrains | None = None
        """None: no round has decided yet which runners drain."""
        self._drains_revision = 0
        self._since: dict[str, int] = {}
        """By instance: the drains revision since which it has been draining without a break."""
        self._catalog: CatalogSnapshot | None = None
        self._revision = 0
        self._changed = changed
        self._leadership = leadership
        self.link: Link[scheduler_pb2.SyncUp, scheduler_pb2.SyncDown] = Link(
            "scheduler",
            address,
            SYNC,
            network=surroundings.network,
            greet=self._greet,
            receive=self._receive,
            opened=self._opened,
            closed=lambda _: self._closed(),
        )

    async def run(self) -> None:
        self.awaited.leader_begins(self.clock())
        await self.link.run()

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._wall(), UTC)

    @property
    def connected(self) -> bool:
        return self.link.connected

    @property
    def adapter_reports(self) -> Mapping[ObjectName, AdapterReport]:
        return self._knowledge.known

    @property
    def reported_groups(self) -> frozenset[ObjectName] | None:
        """The groups of which a scheduler has reported everything: what it has not named is not there. None: all."""
        return self.awaited.reported_groups(self.clock())

    @property
    def advice_is_awaited(self) -> bool:
        """Whether advice about the number of runners may still come that has not come yet, or is stale."""
        return self.awaited.advice_is_awaited(self.clock())

    @property
    def wait_ends_in(self) -> float | None:
        """Seconds until one of the last two changes without any message; None: it does not."""
        return self.awaited.ends_in(self.clock())

    def send_state(
        self, catalog: CatalogSnapshot, drains: Iterable[RunnerDrain], instances: Iterable[str] = ()
    ) -> None:
        """Send what has changed since the last call. `instances` are the runners that exist."""
        self._drains = {drain.instance: drain for drain in drains}
        self.drained &= self._drains.keys()
        self._send_drains()
        before, self._catalog = self._catalog, catalog  # of equal ones the newest: the next is compared faster with it
        if catalog != before:
            self._revision += 1
            self._knowledge.keep_only({adapter.name for adapter in catalog.adapters})
            pools = {pool.pool for pool in catalog.pools}
            self.advice = {name: advice for name, advice in self.advice.items() if name in pools}
            self.awaited.keep_only({pool.group for pool in catalog.pools})
            self.link.send(self._snapshot())
        existed, self._instances = self._instances, frozenset(instances)
        for instance in existed - self._instances:
            self._forget(instance)

    def _forget(self, instance: str) -> None:
        self.attached.discard(instance)
        self.unhealthy.pop(instance, None)
        self.requests.pop(instance, None)
        self.slots.pop(instance, None)
        self.batch_caps.pop(instance, None)
        self.kernels.pop(instance, None)
        self.identities.pop(instance, None)

    def _greet(self) -> Iterable[scheduler_pb2.SyncUp]:
        # Send nothing before the manifests have been read: an empty catalog would unload all adapters.
        if self._sent_drains is not None:
            yield self._all_drains()
        if self._catalog is not None:
            yield self._snapshot()

    def _send_drains(self) -> None:
        wanted: SentDrains = {
            instance: (self._identity(drain).incarnation, drain.deadline) for instance, drain in self._drains.items()
        }
        if wanted != self._sent_drains:
            self._sent_drains = wanted
            self._drains_revision += 1
            self._since = {instance: self._since.get(instance, self._drains_revision) for instance in wanted}
            self.link.send(self._all_drains())

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
                        tenants=pool.tenants,
                        max_classes={name: _CLASSES[priority] for name, priority in pool.max_priorities.items()},
                        limits={name: _limits(one) for name, one in pool.limits.items()},
                        weights=pool.weights,
                        chat=pool.chat.to_proto(),
                        cold_wait_seconds=pool.cold_wait_seconds,
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
                        volume=adapter.volume,
                        folder=adapter.folder,
                        share=adapter.share,
                        limits=_limits(adapter.limits) if adapter.limits is not None else None,
                        chat=adapter.chat.to_proto(),
                        requires_record=adapter.requires_record,
                        refuses_mismatch=adapter.refuses_mismatch,
                    )
                    for adapter in self._catalog.adapters
                ],
                namespaces=[scheduler_pb2.Namespace(name=name, uid=uid) for name, uid in self._catalog.namespaces],
            ),
        )

    def _all_drains(self) -> scheduler_pb2.SyncUp:
        now = self._now()
        runners = [
            scheduler_pb2.DrainRunner(
                runner=self._identity(drain), deadline_seconds=max(0.0, (drain.deadline - now).total_seconds())
            )
            for drain in self._drains.values()
        ]
        return scheduler_pb2.SyncUp(
            term=self._term, drains=scheduler_pb2.Drains(runners=runners, revision=self._drains_revision)
        )

    def _identity(self, drain: RunnerDrain) -> common_pb2.RunnerIdentity:
        return self.identities.get(drain.instance) or common_pb2.RunnerIdentity(
            pool=str(drain.pool), revision=drain.revision, instance=drain.instance
        )

    def _receive(self, message: scheduler_pb2.SyncDown) -> None:
        match message.WhichOneof("message"):
            case "adapter":
                report = message.adapter
                self._knowledge.report(ObjectName(report.ref.namespace, report.ref.name), knowledge_of(report))
            case "desired":
                it = message.desired
                self.advice[ObjectName.parse(it.pool)] = ScalingAdvice(
                    replicas=it.replicas, code=it.reason_code, reason=it.reason, stale=it.stale
                )
            case "outranked":
                self._raise_term_above(message.outranked.term)
                return
            case "drained":
                if not self._on_drained(message.drained):
                    return
            case "welcome":
                self.awaited.scheduler_speaks(self.clock())
                return
            case "reported_all":
                self.awaited.reported_all(ObjectName.parse(group) for group in message.reported_all.groups)
            case "runner":
                if not self._on_runner_report(message.runner):
                    return
            case _:
                return
        self._changed()

    @property
    def _term(self) -> int:
        leadership = self._leadership()
        return leadership.term if leadership is not None else 0

    def _raise_term_above(self, term: int) -> None:
        """Another operator has led in a later term: a successor, or one of an earlier Lease that was deleted."""
        leadership = self._leadership()
        if leadership is not None and term >= leadership.term:
            check_term(term, leadership.term, "the scheduler")
            leadership.raise_term_above(term, self._send_all)

    def _send_all(self) -> None:
        for message in self._greet():
            self.link.send(message)

    def _opened(self) -> None:
        self._knowledge.stream_opened(self._instances)
        self._changed()

    def _closed(self) -> None:
        """The demand is unknown from now on: stale advice keeps runners and removes none."""
        self.awaited.stream_closed(self.clock())
        self.advice = {
            name: replace(advice, stale=True, reason="the scheduler is not connected")
            for name, advice in self.advice.items()
        }
        self._changed()

    def _on_drained(self, drained: scheduler_pb2.Drained) -> bool:
        """Whether the report counts: not if the drain was cancelled meanwhile, or if it is about an earlier process."""
        runner = drained.runner
        incarnation, _ = (self._sent_drains or {}).get(runner.instance, (None, None))
        if incarnation is None or drained.drains_revision < self._since[runner.instance]:
            return False
        if incarnation and runner.incarnation and incarnation != runner.incarnation:
            return False
        self.drained.add(runner.instance)
        return True

    def _on_runner_report(self, report: scheduler_pb2.RunnerReport) -> bool:
        """Whether the report changes anything for the next round."""
        identity = report.runner
        self._knowledge.runner_reported(identity.instance)
        if not report.attached and identity.instance not in self._instances:
            self._forget(identity.instance)  # the last report about a runner that is gone
            return False
        earlier = self.identities.get(identity.instance)
        self.identities[identity.instance] = identity
        if identity.instance in self._drains:
            if earlier is not None and earlier.incarnation != identity.incarnation:
                self.drained.discard(identity.instance)  # a new process does not know of the drain yet
            self._send_drains()
        came_or_went = report.attached != (identity.instance in self.attached)
        (self.attached.add if report.attached else self.attached.discard)(identity.instance)
        self.requests[identity.instance] = report.running + report.waiting
        slots = report.capacity.adapter_slots
        resized, self.slots[identity.instance] = slots != self.slots.get(identity.instance), slots
        resized |= self._note_kernels(report) | self._note_batch_cap(report)
        before = self.unhealthy.get(identity.instance)
        if report.unhealthy and before is not None and before.incarnation == identity.incarnation:
            return resized or came_or_went  # also if its streams were closed meanwhile: it still hangs
        self.unhealthy.pop(identity.instance, None)
        # If its streams were closed first, the process has probably ended and its successor may be loading.
        if report.unhealthy and report.attached:
            now = self._now()
            self.unhealthy[identity.instance] = UnhealthyRunner(identity.incarnation, report.unhealthy, now)
            return True
        return before is not None or resized or came_or_went

    def _note_kernels(self, report: scheduler_pb2.RunnerReport) -> bool:
        """Whether they are others than before."""
        if not report.HasField("kernels"):
            return False
        kernels = KernelState.from_proto(report.kernels)
        before = self.kernels.get(report.runner.instance)
        self.kernels[report.runner.instance] = kernels
        return kernels != before

    def _note_batch_cap(self, report: scheduler_pb2.RunnerReport) -> bool:
        """Whether the number is another one or, of a runner that computes one request at once, its time has changed by
        a tenth: every report has other forecasts, and near the target they are now above it and now below."""
        name = report.runner.instance
        before = self.batch_caps.get(name)
        if not report.HasField("batch_cap"):
            return self.batch_caps.pop(name, None) is not None
        cap = BatchCap.from_proto(report.batch_cap)
        if before is not None and before.sequences == cap.sequences:
            change = abs(cap.alone_seconds - before.alone_seconds)
            if cap.sequences != 1 or change <= 0.1 * before.alone_seconds:
                return False
        self.batch_caps[name] = cap
        return True


def knowledge_of(report: scheduler_pb2.AdapterReport) -> AdapterReport:
    return AdapterReport(
        generation=report.ref.generation,
        serving_digest=report.serving_digest,
        artifact=_artifact(report.certificate) if report.HasField("certificate") else None,
        failure_code=report.failure.code,
        failure_reason=reason_of(report.failure),
        failure_message=report.failure.message,
        failure_passes=report.failure.retry_after_seconds > 0,
        replicas=tuple(
            AdapterReplica(runner=replica.instance, tier=_TIERS.get(replica.tier, "unknown"), digest=replica.digest)
            for replica in sorted(report.replicas, key=lambda replica: (replica.instance, replica.tier))
        ),
        source=report.serving_source,
        source_revision=report.serving_revision,
        checking=report.checking,
    )


def _artifact(it: scheduler_pb2.Certificate) -> Artifact | None:
    """None if the certificate is not valid: no status could hold it."""
    try:
        return Artifact(
            digest=it.digest,
            short_digest=it.digest.removeprefix("sha256:")[:12],
            size_bytes=it.size_bytes,
            rank=it.rank,
            alpha=f"{it.alpha:g}",
            target_modules=tuple(sorted(it.target_modules))[:MAX_MODULES],
            format="peft",
            checker=it.checker,
            base_digest=it.base_digest or None,
            proved_by=tuple(name[:64] for name in it.proved_by)[:MAX_KERNELS],
            recorded_answers=_AGREEMENTS.get(it.recorded_answers),
            template_digest=it.template_digest or None,
            warnings=tuple(warning[:253] for warning in it.warnings)[:MAX_WARNINGS],
        )
    except ValidationError as error:
        log.warning("certificate_invalid", digest=it.digest[:80], problems=error.error_count())
        return None


def _limits(it: Limits) -> scheduler_pb2.Limits:
    return scheduler_pb2.Limits(
        requests_per_minute=it.requests_per_minute or 0,
        tokens_per_minute=it.tokens_per_minute or 0,
        concurrency=it.concurrency or 0,
    )
