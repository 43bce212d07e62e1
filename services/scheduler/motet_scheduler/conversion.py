"""Converts messages to events and effects to messages: all of the scheduler's protocol.

What is said of each request is set field by field: to make the same by constructors takes three times as long. Equal
texts of requests are one object, as a hundred thousand may wait.
"""

from collections.abc import Iterable
from itertools import islice
from math import inf, isfinite
from sys import intern
from typing import NamedTuple, cast

from motet.api.v1 import common_pb2, scheduler_pb2, supervisor_pb2
from motet.chat_formats import ChatFormats
from motet.digest import is_digest
from motet.domain import Digest, InstanceName, RequestId, Tenant
from motet.errors import AdapterUnproved
from motet.held_templates import MAX_HELD_TEMPLATES
from motet.prefix_hints import MAX_CACHED_HINTS, MAX_PROMPT_HINTS
from motet.quotas import CLAIM_SECONDS, MAX_CLAIMS_IN_MESSAGE, MAX_DEBT_SECONDS
from motet.runner_info import (
    BatchCap,
    Capacity,
    Failure,
    KernelState,
    RequestClass,
    RunnerIdentity,
    check_listed,
    known_seconds,
    read_resident_adapters,
    read_runner_requests,
)
from motet.shares import weight_said
from motet.terms import check_epoch
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters.refused_digests import MAX_REFUSED
from motet_scheduler.policy.quotas.accounts import AccountId, AccountLevel, Holder, ToldClaim
from motet_scheduler.policy.values import (
    AGREEMENTS,
    MAX_BUILDS,
    MAX_KERNELS,
    USUAL_COLD_WAIT,
    AdapterReadiness,
    AdapterRef,
    AdapterSpec,
    AdapterStage,
    BaseModel,
    Catalog,
    CatalogAdapter,
    CatalogChanges,
    Certificate,
    Estimate,
    GroupName,
    KeyAccount,
    Limits,
    PoolSpec,
    Promise,
    RevisionKey,
    ScalingMode,
)

_READINESS = {
    AdapterReadiness.COLD: scheduler_pb2.ADAPTER_READINESS_COLD,
    AdapterReadiness.READY: scheduler_pb2.ADAPTER_READINESS_READY,
    AdapterReadiness.LOADING: scheduler_pb2.ADAPTER_READINESS_LOADING,
    AdapterReadiness.FAILED: scheduler_pb2.ADAPTER_READINESS_FAILED,
}
_SCALING = {
    scheduler_pb2.SCALING_MODE_BUILTIN: ScalingMode.BUILTIN,
    scheduler_pb2.SCALING_MODE_EXTERNAL: ScalingMode.EXTERNAL,
}
_HOLDERS = frozenset(Holder)
MAX_DIGEST_CHARS = 100
_FINISHES = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
    common_pb2.FINISH_REASON_FAILED: "failed",
}

# --------------------------------------------------------------------------------------------------------------- values


def read_promise(it: common_pb2.Promise) -> Promise:
    return Promise(it.pages, it.tokens, it.adapter_bytes, it.number)


def write_promise(it: Promise) -> common_pb2.Promise:
    return common_pb2.Promise(pages=it.pages, tokens=it.tokens, adapter_bytes=it.adapter_bytes, number=it.number)


def _set_promise(promise: common_pb2.Promise, it: Promise) -> None:
    promise.pages, promise.tokens = it.pages, it.tokens
    promise.adapter_bytes, promise.number = it.adapter_bytes, it.number


def _read_estimate(it: common_pb2.Estimate) -> Estimate:
    return Estimate(q50=it.q50, q80=it.q80, q90=it.q90, q95=it.q95, mean=it.rank, source=it.source)


def _read_ref(it: common_pb2.AdapterRef) -> AdapterRef:
    return AdapterRef(it.namespace, it.name, it.generation)


def _write_ref(it: AdapterRef) -> common_pb2.AdapterRef:
    return common_pb2.AdapterRef(namespace=it.namespace, name=it.name, generation=it.generation)


def read_certificate(it: scheduler_pb2.Certificate) -> Certificate:
    return Certificate(
        digest=Digest(it.digest),
        size_bytes=it.size_bytes,
        rank=it.rank,
        alpha=it.alpha,
        target_modules=tuple(it.target_modules),
        mapped=it.mapped,
        unmapped=tuple(it.unmapped),
        base_digest=it.base_digest,
        method=it.method,
        max_delta_to_base=it.max_delta_to_base,
        max_delta_to_reference=it.max_delta_to_reference,
        checker=it.checker,
        warnings=tuple(it.warnings),
        device_rank=it.device_rank,
        proved_by=tuple(it.proved_by[:MAX_KERNELS]),
        recorded_answers=it.recorded_answers if it.recorded_answers in AGREEMENTS else "",
        template_digest=it.template_digest if is_digest(it.template_digest) else "",
        proved_builds=tuple(one for one in it.proved_builds[:MAX_BUILDS] if len(one) <= MAX_DIGEST_CHARS),
    )


def _write_certificate(it: Certificate) -> scheduler_pb2.Certificate:
    return scheduler_pb2.Certificate(
        digest=it.digest,
        size_bytes=it.size_bytes,
        rank=it.rank,
        alpha=it.alpha,
        target_modules=it.target_modules,
        mapped=it.mapped,
        unmapped=it.unmapped,
        base_digest=it.base_digest,
        method=it.method,
        max_delta_to_base=it.max_delta_to_base,
        max_delta_to_reference=it.max_delta_to_reference,
        checker=it.checker,
        warnings=it.warnings,
        device_rank=it.device_rank,
        proved_by=it.proved_by,
        recorded_answers=it.recorded_answers,
        template_digest=it.template_digest,
    )


def _read_limits(it: scheduler_pb2.Limits) -> Limits:
    return Limits(
        requests_per_minute=it.requests_per_minute, tokens_per_minute=it.tokens_per_minute, concurrency=it.concurrency
    )


def _read_key(it: scheduler_pb2.Enqueue | scheduler_pb2.LiveRequest) -> KeyAccount | None:
    return KeyAccount(it.key.id, _read_limits(it.key.limits)) if it.HasField("key") else None


def _write_account(it: AccountLevel) -> scheduler_pb2.AccountLevel:
    return scheduler_pb2.AccountLevel(
        holder=it.holder,
        name=it.name,
        group=it.group,
        requests_per_minute=it.requests_per_minute,
        requests=it.requests,
        tokens_per_minute=it.tokens_per_minute,
        tokens=it.tokens,
        unplaced_requests=it.unplaced_requests,
        unplaced_tokens=it.unplaced_tokens,
        book=it.book,
    )


def _read_accounts(it: scheduler_pb2.AccountLevels) -> tuple[tuple[AccountLevel, float], ...]:
    """Each with its age. Without those whose numbers mean nothing."""
    found = []
    for one in it.accounts:
        numbers = (one.requests, one.tokens, one.unplaced_requests, one.unplaced_tokens, one.age_seconds)
        if one.holder in _HOLDERS and all(map(isfinite, numbers)) and one.age_seconds >= 0:
            found.append(
                (
                    AccountLevel(
                        Holder(one.holder),
                        one.name,
                        one.group,
                        one.requests_per_minute,
                        one.requests,
                        one.tokens_per_minute,
                        one.tokens,
                        one.unplaced_requests,
                        one.unplaced_tokens,
                        one.book,
                    ),
                    one.age_seconds,
                )
            )
    return tuple(found)


def _write_claim(it: ToldClaim) -> scheduler_pb2.Claim:
    return scheduler_pb2.Claim(
        number=it.number,
        content=it.content,
        seconds=it.seconds,
        requests=it.requests,
        tokens=it.tokens,
        accounts=[
            scheduler_pb2.AccountName(
                holder=one.holder,
                name=one.name,
                group=one.group,
                requests_per_minute=requests,
                tokens_per_minute=tokens,
            )
            for one, (requests, tokens) in zip(it.accounts, it.grants, strict=True)
        ],
    )


def _read_claims(it: scheduler_pb2.AccountLevels) -> tuple[ToldClaim, ...]:
    """Without those that no scheduler has told, and those that everybody is too late for."""
    return tuple(
        ToldClaim(
            one.number,
            one.content,
            one.seconds,
            one.requests,
            one.tokens,
            tuple(AccountId(Holder(name.holder), name.name, name.group) for name in one.accounts),
            tuple((name.requests_per_minute, name.tokens_per_minute) for name in one.accounts),
        )
        for one in it.claims[:MAX_CLAIMS_IN_MESSAGE]
        if one.number
        and -CLAIM_SECONDS <= one.seconds <= MAX_DEBT_SECONDS
        and 0 <= one.requests < inf
        and 0 <= one.tokens < inf
        and len({name.holder for name in one.accounts}) == len(one.accounts)
        and all(name.holder in _HOLDERS for name in one.accounts)
    )


def _read_parent(it: str) -> RequestId | None:
    return RequestId(it) if it else None


def _class(it: RequestClass) -> "common_pb2.RequestClass.ValueType":
    return cast("common_pb2.RequestClass.ValueType", int(it))


# ------------------------------------------------------------------------------------------------------------ gateways


def gateway_connected(hello: scheduler_pb2.GatewayHello) -> events.GatewayConnected:
    return events.GatewayConnected(hello.gateway, tuple(map(_read_live, hello.live)), hello.live_follows)


def _read_live(live: scheduler_pb2.LiveRequest) -> events.LiveRequest:
    return events.LiveRequest(
        request=RequestId(live.request),
        epoch=check_epoch(live.epoch, live.request),
        instance=InstanceName(live.instance),
        incarnation=live.incarnation,
        promise=read_promise(live.promise),
        tenant=Tenant(intern(live.tenant)),
        group=GroupName(intern(live.group)),
        digest=Digest(intern(live.adapter_digest)),
        adapter=intern(live.adapter),
        base=intern(live.base_digest),
        request_class=RequestClass.from_proto(live.request_class),
        prompt_tokens=live.prompt_tokens,
        max_tokens=live.max_tokens,
        delivered=live.delivered_tokens,
        age=live.age_seconds,
        deadline=live.deadline_seconds,
        estimate=_read_estimate(live.estimate),
        parent=_read_parent(live.parent),
        api_key=_read_key(live),
    )


def serve_event(gateway: str, up: scheduler_pb2.ServeUp) -> events.Event | None:
    """The event of a gateway's message after its hello; None for messages of a later version."""
    match up.WhichOneof("message"):
        case "enqueue":
            it = up.enqueue
            return events.Enqueued(
                gateway=gateway,
                request=RequestId(it.request),
                tenant=Tenant(intern(it.tenant)),
                group=GroupName(intern(it.group)),
                digest=Digest(intern(it.adapter_digest)),
                adapter=intern(it.adapter),
                base=intern(it.base_digest),
                request_class=RequestClass.from_proto(it.request_class),
                prompt_tokens=it.prompt_tokens,
                max_tokens=it.max_tokens,
                delivered=it.delivered_tokens,
                epoch=check_epoch(it.epoch, it.request),
                estimate=_read_estimate(it.estimate),
                deadline=it.deadline_seconds,
                whole_deadline=it.whole_deadline_seconds,
                age=it.age_seconds,
                avoid=tuple(it.avoid),
                parent=_read_parent(it.parent),
                choices=max(1, it.choices),
                prefix_hints=tuple(it.prefix_hashes[:MAX_PROMPT_HINTS]),
                api_key=_read_key(it),
                admitted=it.admitted,
            )
        case "cancel":
            return events.CancelRequested(gateway, RequestId(up.cancel.request))
        case "finished":
            done = up.finished
            reason = _FINISHES.get(done.reason, "for a reason of a newer gateway")
            return events.RequestFinished(gateway, RequestId(done.request), done.epoch, done.output_tokens, reason)
        case "lost":
            lost = up.lost
            epoch = check_epoch(lost.epoch, lost.request)
            return events.RequestLost(gateway, RequestId(lost.request), epoch, lost.why, lost.delivered_tokens)
        case "levels":
            return events.LevelsTold(gateway, _read_accounts(up.levels), _read_claims(up.levels))
        case "live":
            return events.GatewayTold(gateway, tuple(map(_read_live, up.live.requests)), up.live.more)
        case "held":
            return read_held(gateway, up.held)
        case _:
            return None


def read_held(gateway: str, held: scheduler_pb2.Held) -> events.RequestsHeld:
    groups = tuple((GroupName(one.group), one.requests) for one in held.groups)
    templates = ((GroupName(one.group), Digest(digest)) for one in held.groups for digest in one.templates)
    return events.RequestsHeld(gateway, groups, tuple(islice(templates, MAX_HELD_TEMPLATES)))


def place(effect: effects.SendPlaced, term: int) -> scheduler_pb2.ServeDown:
    down = scheduler_pb2.ServeDown()
    if effect.moved_reason:
        down.moved.reason, down.moved.engine_hung = effect.moved_reason, effect.engine_hung
    placed = down.moved.placement if effect.moved_reason else down.placed
    placed.term, placed.request, placed.epoch = term, effect.request, effect.epoch
    placed.instance, placed.incarnation, placed.address = effect.instance, effect.incarnation, effect.address
    _set_promise(placed.promise, effect.promise)
    placed.base_digest, placed.weight = effect.base, effect.weight
    placed.accounts.extend(map(_write_account, effect.accounts))
    placed.claims.extend(effect.claims)
    return down


def refuse(effect: effects.SendRefused, term: int) -> scheduler_pb2.ServeDown:
    return scheduler_pb2.ServeDown(
        refused=scheduler_pb2.Refused(
            request=effect.request,
            failure=effect.failure.to_proto(),
            term=term,
            epoch=effect.epoch,
            accounts=map(_write_account, effect.accounts),
            claim=_write_claim(effect.claim) if effect.claim is not None else None,
        )
    )


def position(effect: effects.SendPosition) -> scheduler_pb2.ServeDown:
    down = scheduler_pb2.ServeDown()
    told = down.position
    told.request, told.position, told.why, told.admitted = effect.request, effect.position, effect.why, effect.admitted
    return down


class CatalogRevision(NamedTuple):
    """The higher one belongs to the newer catalog."""

    term: int
    number: int


def catalog(it: Catalog, revision: CatalogRevision) -> scheduler_pb2.ServeDown:
    return scheduler_pb2.ServeDown(
        catalog=scheduler_pb2.Catalog(
            term=revision.term,
            revision=revision.number,
            groups=_write_groups(it),
            adapters=map(_write_catalog_adapter, it.adapters),
            namespaces=[scheduler_pb2.Namespace(name=name, uid=uid) for name, uid in it.namespaces],
        )
    )


def catalog_changes(
    it: Catalog, changes: CatalogChanges, before: CatalogRevision, revision: CatalogRevision
) -> scheduler_pb2.ServeDown:
    return scheduler_pb2.ServeDown(
        catalog_changes=scheduler_pb2.CatalogChanges(
            term=revision.term,
            revision=revision.number,
            before_term=before.term,
            before=before.number,
            groups=_write_groups(it),
            adapters=map(_write_catalog_adapter, changes.adapters),
            removed=map(_write_ref, changes.removed),
        )
    )


def _write_groups(it: Catalog) -> list[scheduler_pb2.CatalogGroup]:
    return [
        scheduler_pb2.CatalogGroup(
            group=group.group,
            served_name=group.served_name,
            base_digest=group.base_digest,
            asset_digest=group.asset_digest,
            max_model_length=group.max_model_length,
            runners=[
                scheduler_pb2.CatalogRunner(instance=instance, address=address) for instance, address in group.runners
            ],
            model_uri=group.model_uri,
            pools=group.pools,
            tenants=group.tenants,
            max_classes={name: _class(one) for name, one in group.max_classes},
            chat=group.chat.to_proto(),
        )
        for group in it.groups
    ]


def _write_catalog_adapter(adapter: CatalogAdapter) -> scheduler_pb2.CatalogAdapter:
    return scheduler_pb2.CatalogAdapter(
        ref=_write_ref(adapter.ref),
        group=adapter.group,
        model_name=adapter.model_name,
        state=_READINESS[adapter.state],
        digest=adapter.digest,
        failure=adapter.failure.to_proto() if adapter.failure is not None else None,
        rank=adapter.rank,
        source=adapter.source,
        max_class=_class(adapter.max_class),
        share=adapter.share,
        base_digest=adapter.base.digest if adapter.base is not None else "",
        asset_digest=adapter.base.asset_digest if adapter.base is not None else "",
        chat=adapter.chat.to_proto(),
        template_digest=adapter.template_digest,
    )


# ------------------------------------------------------------------------------------------------------------- runners


def runner_attached(hello: scheduler_pb2.RunnerHello) -> events.RunnerAttached:
    return events.RunnerAttached(
        identity=RunnerIdentity.from_proto(hello.identity),
        address=hello.address,
        capacity=Capacity.from_proto(hello.capacity),
        base=BaseModel(
            digest=hello.base.digest, asset_digest=hello.base.asset_digest, architecture=hello.base.architecture
        ),
        resident=read_resident_adapters(hello.resident),
        live=read_runner_requests(hello.live),
        more=hello.live_follows,
        kernels=_read_kernels(hello),
        refused=_read_refused(hello),
        refused_is_all=hello.refused_is_all and len(hello.refused) <= MAX_REFUSED,
    )


def _read_refused(hello: scheduler_pb2.RunnerHello) -> dict[Digest, Failure]:
    found = {
        Digest(one.digest): Failure.from_proto(one.failure)
        for one in hello.refused[-MAX_REFUSED:]
        if 0 < len(one.digest) <= MAX_DIGEST_CHARS
    }
    return {digest: failure for digest, failure in found.items() if failure.code == AdapterUnproved.mapping.code}


def _read_kernels(message: scheduler_pb2.RunnerHello | scheduler_pb2.Report) -> KernelState | None:
    return KernelState.from_proto(message.kernels) if message.HasField("kernels") else None


def attach_event(identity: RunnerIdentity, up: scheduler_pb2.AttachUp) -> events.Event | None:
    """The event of a runner's message after its hello; None for messages of a later version."""
    instance = InstanceName(identity.instance)
    match up.WhichOneof("message"):
        case "report":
            it = up.report
            return events.RunnerReported(
                instance=instance,
                incarnation=identity.incarnation,
                pages=it.pages,
                pages_free=it.pages_free,
                running=it.running,
                waiting=it.waiting,
                steps=it.steps,
                resident=None if it.residency_told else read_resident_adapters(it.resident),
                live=read_runner_requests(it.live),
                more=it.live_follows,
                cached_prefixes=frozenset(it.cached_prefixes[:MAX_CACHED_HINTS]),
                kernels=_read_kernels(it),
                batch_cap=BatchCap.from_proto(it.batch_cap) if it.HasField("batch_cap") else None,
                step_seconds=known_seconds(it.step_seconds),
                prompt_token_seconds=known_seconds(it.prefill_seconds_per_token),
                fixed_seconds=known_seconds(it.fixed_seconds),
                sequence_seconds=known_seconds(it.sequence_seconds),
                pending_prompt_tokens=it.pending_prefill_tokens,
            )
        case "listed":
            live = read_runner_requests(up.listed.requests, "requests")
            return events.RunnerListed(instance, identity.incarnation, live, up.listed.more)
        case "declined":
            no = up.declined
            return events.RunnerDeclined(instance, RequestId(no.request), no.epoch, Failure.from_proto(no.failure))
        case "ended":
            check_listed(len(up.ended.sequences), "sequences")
            ended = tuple((RequestId(one.request), one.epoch) for one in up.ended.sequences)
            return events.SequencesEnded(instance, identity.incarnation, ended)
        case "residency":
            gone = tuple(map(Digest, up.residency.gone))
            now = read_resident_adapters(up.residency.resident)
            return events.ResidencyChanged(instance, identity.incarnation, gone, now)
        case "draining":
            return events.RunnerShuttingDown(instance, identity.incarnation, max(0.0, up.draining.deadline_seconds))
        case "adapter":
            state = up.adapter
            return events.AdapterStateChanged(
                instance=instance,
                ref=_read_ref(state.ref),
                digest=Digest(state.digest),
                stage=AdapterStage.from_proto(state.stage),
                certificate=read_certificate(state.certificate) if state.HasField("certificate") else None,
                failure=Failure.from_proto(state.failure) if state.HasField("failure") else None,
                bytes=state.bytes,
                progress=state.progress,
                order=state.order,
                ordered_stage=AdapterStage.from_proto(state.answers),
            )
        case _:
            return None


def runner_message(effect: effects.RunnerEffect, term: int) -> scheduler_pb2.AttachDown:
    match effect:
        case effects.ExpectRequest():
            down = scheduler_pb2.AttachDown()
            expect = down.expect
            expect.term, expect.request, expect.epoch = term, effect.request, effect.epoch
            _set_promise(expect.promise, effect.promise)
            expect.adapter_digest, expect.gateway = effect.digest, effect.gateway
            return down
        case effects.EnsureAdapter():
            down = scheduler_pb2.AttachDown()
            ensure, ref = down.ensure, effect.ref
            ensure.term, ensure.order, ensure.max_bytes = term, effect.order, effect.max_bytes
            adapter = ensure.adapter
            adapter.namespace, adapter.name, adapter.generation = ref.namespace, ref.name, ref.generation
            ensure.source, ensure.revision, ensure.credentials = (
                effect.source,
                effect.source_revision,
                effect.credentials,
            )
            ensure.expected_digest, ensure.volume, ensure.folder = effect.expected_digest, effect.volume, effect.folder
            ensure.requires_record, ensure.refuses_mismatch = effect.requires_record, effect.refuses_mismatch
            ensure.proved_builds.extend(effect.proved_builds)
            ensure.cached_only = effect.cached_only
            ensure.stage = cast("common_pb2.AdapterStage.ValueType", int(effect.stage))
            return down
        case effects.DropAdapter():
            return scheduler_pb2.AttachDown(
                drop=scheduler_pb2.DropAdapter(term=term, digest=effect.digest, adapter=_write_ref(effect.ref))
            )
        case effects.PinAdapters():
            return scheduler_pb2.AttachDown(pin=scheduler_pb2.PinAdapters(term=term, digests=effect.digests))
        case effects.ForgetManifest():
            return scheduler_pb2.AttachDown(drop=scheduler_pb2.DropAdapter(term=term, adapter=_write_ref(effect.ref)))
        case effects.CancelAtRunner():
            return scheduler_pb2.AttachDown(
                cancel=scheduler_pb2.CancelRequest(
                    term=term, request=effect.request, epoch=effect.epoch, reason=effect.reason
                )
            )
        case effects.DrainRunner():
            return scheduler_pb2.AttachDown(drain=scheduler_pb2.Drain(term=term, deadline_seconds=effect.deadline))
        case effects.TakeWork():
            return scheduler_pb2.AttachDown(take_work=scheduler_pb2.TakeWork(term=term))


# ------------------------------------------------------------------------------------------------------------ operator


def _read_pool(it: scheduler_pb2.PoolEntry) -> PoolSpec:
    return PoolSpec(
        pool=it.pool,
        group=GroupName(it.group or it.pool),
        served_name=it.served_name,
        model_uri=it.model_uri,
        replicas=it.replicas,
        max_sequences=it.max_sequences,
        scaling=_SCALING.get(it.scaling, ScalingMode.DISABLED),
        min_replicas=it.min_replicas,
        max_replicas=it.max_replicas or None,
        stabilization=it.scale_down_stabilization_seconds,
        tenants=tuple(it.tenants),
        max_classes=tuple(sorted((name, RequestClass.from_proto(one)) for name, one in it.max_classes.items())),
        limits=tuple(sorted((name, _read_limits(one)) for name, one in it.limits.items())),
        weights=tuple(sorted((name, weight_said(one)) for name, one in it.weights.items())),
        chat=ChatFormats.from_proto(it.chat),
        cold_wait=it.cold_wait_seconds or USUAL_COLD_WAIT,
    )


def _read_adapter(it: scheduler_pb2.AdapterEntry) -> AdapterSpec:
    return AdapterSpec(
        ref=_read_ref(it.ref),
        group=GroupName(it.group),
        model_name=it.model_name,
        revision=RevisionKey(
            source=it.source,
            source_revision=it.revision,
            expected_digest=it.expected_digest,
            content_stamp=it.content_stamp,
            credentials=it.credentials,
            volume=it.volume,
            folder=it.folder,
            requires_record=it.requires_record,
            refuses_mismatch=it.refuses_mismatch,
        ),
        max_class=RequestClass.from_proto(it.max_class) if it.max_class else RequestClass.INTERACTIVE,
        min_replicas=it.min_replicas,
        max_replicas=it.max_replicas,
        max_bytes=it.max_bytes,
        share=tuple(it.share),
        limits=_read_limits(it.limits),
        chat=ChatFormats.from_proto(it.chat),
    )


KnownAdapters = dict[bytes, AdapterSpec]
"""Those of the last snapshot, as they came"""


def _read_adapters(entries: Iterable[scheduler_pb2.AdapterEntry], known: KnownAdapters) -> tuple[AdapterSpec, ...]:
    """Snapshots are whole, and mostly little has changed: what has not is not read again."""
    now: KnownAdapters = {}
    for entry in entries:
        as_bytes = entry.SerializeToString()
        now[as_bytes] = known.get(as_bytes) or _read_adapter(entry)
    known.clear()
    known.update(now)
    return tuple(now.values())


def sync_event(up: scheduler_pb2.SyncUp, known: KnownAdapters | None = None) -> events.Event | None:
    match up.WhichOneof("message"):
        case "snapshot":
            stated = up.snapshot
            return events.CatalogReplaced(
                tuple(_read_pool(pool) for pool in stated.pools),
                _read_adapters(stated.adapters, known if known is not None else {}),
                tuple((namespace.name, namespace.uid) for namespace in stated.namespaces),
            )
        case "delta":
            delta = up.delta
            return events.CatalogUpdated(
                tuple(_read_pool(pool) for pool in delta.pools),
                tuple(_read_adapter(adapter) for adapter in delta.adapters),
                tuple(delta.removed_pools),
                tuple(_read_ref(ref) for ref in delta.removed_adapters),
            )
        case "drains":
            return events.DrainsDeclared(
                tuple(
                    events.DrainRequested(RunnerIdentity.from_proto(one.runner), max(0.0, one.deadline_seconds))
                    for one in up.drains.runners
                ),
                up.drains.revision,
            )
        case _:
            return None


def operator_message(effect: effects.OperatorEffect) -> scheduler_pb2.SyncDown:
    match effect:
        case effects.ReportAdapter():
            return scheduler_pb2.SyncDown(
                adapter=scheduler_pb2.AdapterReport(
                    ref=_write_ref(effect.ref),
                    serving_digest=effect.serving,
                    state=_READINESS[effect.state],
                    certificate=_write_certificate(effect.certificate) if effect.certificate is not None else None,
                    failure=effect.failure.to_proto() if effect.failure is not None else None,
                    replicas=[
                        scheduler_pb2.AdapterReplica(
                            instance=instance,
                            tier=cast("common_pb2.MemoryTier.ValueType", int(tier)),
                            digest=digest,
                        )
                        for instance, tier, digest in effect.replicas
                    ],
                    serving_source=effect.source,
                    serving_revision=effect.source_revision,
                    checking=effect.checking,
                )
            )
        case effects.ReportRunner():
            return scheduler_pb2.SyncDown(
                runner=scheduler_pb2.RunnerReport(
                    runner=effect.identity.to_proto(),
                    address=effect.address,
                    attached=effect.attached,
                    capacity=effect.capacity.to_proto(),
                    running=effect.running,
                    waiting=effect.waiting,
                    pages_free=effect.pages_free,
                    unhealthy=effect.unhealthy,
                    kernels=effect.kernels.to_proto() if effect.kernels is not None else None,
                    batch_cap=effect.batch_cap.to_proto() if effect.batch_cap is not None else None,
                )
            )
        case effects.ReportDesiredReplicas():
            return scheduler_pb2.SyncDown(
                desired=scheduler_pb2.DesiredCapacity(
                    pool=effect.pool,
                    replicas=effect.replicas,
                    reason=effect.reason,
                    reason_code=effect.code,
                    stale=effect.stale,
                )
            )
        case effects.ReportDrained():
            return scheduler_pb2.SyncDown(
                drained=scheduler_pb2.Drained(runner=effect.runner.to_proto(), drains_revision=effect.revision)
            )
        case effects.ReportedAll():
            return scheduler_pb2.SyncDown(reported_all=scheduler_pb2.ReportedAll(groups=effect.groups))


# ---------------------------------------------------------------------------------------------------------- supervisor


def _parked(it: supervisor_pb2.RequestParked) -> events.RequestParked:
    return events.RequestParked(InstanceName(it.instance), RequestId(it.request), it.epoch, read_promise(it.promise))


def supervisor_event(down: supervisor_pb2.AdviseDown) -> list[events.Event]:
    match down.WhichOneof("message"):
        case "promise":
            it = down.promise
            return [
                events.PromiseChanged(
                    InstanceName(it.instance), RequestId(it.request), it.epoch, read_promise(it.promise)
                )
            ]
        case "parked":
            return [_parked(down.parked)]
        case "parked_now":
            return [_parked(one) for one in down.parked_now.requests]
        case "resumed":
            back = down.resumed
            return [
                events.RequestResumed(
                    InstanceName(back.instance), RequestId(back.request), back.epoch, read_promise(back.promise)
                )
            ]
        case "lost":
            lost = down.lost
            identity = RunnerIdentity.from_proto(lost.runner)
            return [events.RunnerUnhealthy(identity, lost.why, lost.hung, lost.silent_seconds)]
        case "overcommit":
            return [events.OvercommitSet(down.overcommit.pool, down.overcommit.factor)]
        case _:
            return []  # a message of another version


def allow_resume(effect: effects.AllowResume, term: int) -> supervisor_pb2.AdviseUp:
    return supervisor_pb2.AdviseUp(
        resumable=supervisor_pb2.Resumable(
            term=term,
            instance=effect.instance,
            request=effect.request,
            epoch=effect.epoch,
            promise=write_promise(effect.promise),
        )
    )
