"""What the operator and gateways are told of one adapter."""

from collections.abc import Mapping
from dataclasses import replace

from motet.domain import BASE, InstanceName
from motet.runner_info import Failure, Tier
from motet_scheduler.policy.adapters.adapter import Adapter, Revision
from motet_scheduler.policy.adapters.adapters import Adapters
from motet_scheduler.policy.adapters.revision_state import Standing, is_wrong
from motet_scheduler.policy.adapters.table import AdapterTable
from motet_scheduler.policy.effects import ReportAdapter
from motet_scheduler.policy.group_bases import GroupBases
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.suspects import Suspects
from motet_scheduler.policy.values import AdapterReadiness, CatalogAdapter, Certificate


class AdapterReports:
    def __init__(self, bases: GroupBases, adapters: Adapters, table: AdapterTable, suspects: Suspects) -> None:
        self._bases = bases
        self._adapters = adapters
        self._table = table
        self._suspects = suspects

    def report(self, adapter: Adapter) -> ReportAdapter:
        """The report for the operator. A disconnected runner still counts until it is forgotten: usually its stream
        broke only briefly, and each change would cause one API write per adapter."""
        serving = self._adapters.usable(adapter)
        digest = serving.digest if serving is not None else BASE
        places = tuple((instance, tier, digest) for instance, tier in sorted(self._holders_of(serving).items()))
        resident = any(tier >= Tier.HOST for _, tier, _ in places)
        for other in self._adapters.replaced_of(adapter):
            places += tuple(
                (instance, tier, other) for instance, tier in sorted(self._table.tiers.get(other, {}).items())
            )
        return ReportAdapter(
            ref=adapter.spec.ref,
            serving=digest,
            state=self._readiness(adapter, serving, resident),
            certificate=self._certificate_of(adapter, serving) if serving is not None else None,
            failure=self._failure_of(adapter),
            replicas=places,
            source=serving.key.source if serving is not None else "",
            source_revision=serving.key.source_revision if serving is not None else "",
            checking=adapter.newest.standing is Standing.WANTED,
        )

    def entry(self, adapter: Adapter, runners: Mapping[InstanceName, Runner]) -> CatalogAdapter:
        """The adapter's entry in the gateways' catalog."""
        spec, serving = adapter.spec, self._adapters.usable(adapter)
        other = serving is not None and serving.key.base != adapter.wanted.base
        holders = self._holders_of(serving).items()
        resident = any(tier >= Tier.HOST and runners[instance].attached for instance, tier in holders)
        return CatalogAdapter(
            ref=spec.ref,
            group=spec.group,
            model_name=spec.model_name,
            state=self._readiness(adapter, serving, resident),
            digest=serving.digest if serving is not None else BASE,
            source=serving.key.source if serving is not None else spec.revision.source,
            rank=serving.rank if serving is not None else 0,
            max_class=spec.max_class,
            failure=adapter.failure,
            share=spec.share,
            chat=spec.chat,
            template_digest=serving.template_digest if serving is not None else "",
            base=self._bases.find(spec.group, serving.key.base) if serving is not None and other else None,
        )

    def _holders_of(self, serving: Revision | None) -> Mapping[InstanceName, Tier]:
        return self._table.tiers.get(serving.digest, {}) if serving is not None else {}

    @staticmethod
    def _readiness(adapter: Adapter, serving: Revision | None, resident: bool) -> AdapterReadiness:
        if serving is not None:
            return AdapterReadiness.READY if resident else AdapterReadiness.COLD
        return AdapterReadiness.FAILED if adapter.failure is not None else AdapterReadiness.LOADING

    def _failure_of(self, adapter: Adapter) -> Failure | None:
        """With what the failures of other adapters say about the runner"""
        state = adapter.newest
        if state.failure is None or not is_wrong(state.failure):
            return state.failure
        return self._suspects.said_of(state.failure, [one.runner for one in state.refusals])

    def _certificate_of(self, adapter: Adapter, serving: Revision) -> Certificate | None:
        """With a warning if the proof of what serves has failed somewhere"""
        refusals, certificate = adapter.state_of(serving.key).refusals, serving.certificate
        if certificate is None or not refusals:
            return certificate
        (instance, _), failure = refusals[-1]
        failure = self._suspects.said_of(failure, [one.runner for one in refusals])
        where = instance if len(refusals) == 1 else f"{instance} and {len(refusals) - 1} more"
        warning = f"its proof has failed on {where}, so it is served by other runners only: {failure.message}"
        return replace(certificate, warnings=(*certificate.warnings, warning))
