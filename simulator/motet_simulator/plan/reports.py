"""What the reports of a simulated runner say, for scheduler and supervisor: as its service would say it."""

from collections.abc import Iterator, Mapping

from motet.domain import InstanceName, RequestId
from motet.runner_info import RequestClass, RunnerRequest, SequenceState
from motet_runner.interface import EngineReport, EngineSequenceReport, State
from motet_scheduler.policy import events as scheduler_events
from motet_simulator.plan.answer import Answer
from motet_simulator.plan.disk_cache import DiskCache
from motet_simulator.plan.setup import GATEWAY, INCARNATION
from motet_supervisor.policy import events as supervisor_events

_STATES = {state: SequenceState(state.value) for state in State}


class Reports:
    def __init__(
        self,
        instance: InstanceName,
        accepted: Mapping[RequestId, Answer],
        cache: DiskCache,
    ) -> None:
        """`accepted`: what the runner has."""
        self._instance = instance
        self._accepted = accepted
        self._cache = cache

    def of(self, report: EngineReport) -> tuple[scheduler_events.RunnerReported, supervisor_events.MemoryReported]:
        live = tuple(self._live(report))
        on_device = {entry.digest for entry in report.adapters if entry.on_device}
        to_scheduler = scheduler_events.RunnerReported(
            instance=self._instance,
            incarnation=INCARNATION,
            pages=max(1, report.pages),
            pages_free=report.pages_free,
            running=report.running,
            waiting=report.waiting,
            steps=report.steps,
            resident=self._cache.resident(on_device),
            live=live,
            cached_prefixes=frozenset(report.cached_prefixes),
            batch_cap=report.batch_cap,
            step_seconds=report.step_seconds,
            prompt_token_seconds=report.prefill_seconds_per_token,
            fixed_seconds=report.fixed_seconds,
            sequence_seconds=report.sequence_seconds,
            pending_prompt_tokens=report.pending_prefill_tokens,
        )
        to_supervisor = supervisor_events.MemoryReported(
            instance=self._instance,
            pages=max(1, report.pages),
            host_bytes_free=report.host_bytes_free,
            steps=report.steps,
            work_pending=report.running + report.waiting > 0,
            prefill_seconds_per_token=report.prefill_seconds_per_token,
            swap_seconds_per_page=report.swap_seconds_per_page,
            live=live,
            pages_free=report.pages_free,
        )
        return to_scheduler, to_supervisor

    def _live(self, report: EngineReport) -> Iterator[RunnerRequest]:
        reported = {entry.request: entry for entry in report.sequences}
        for request, answer in self._accepted.items():
            entry = reported.get(request)
            if entry is not None and entry.epoch == answer.epoch:
                yield self.entry(entry)
                continue
            assert answer.promise is not None
            yield RunnerRequest(
                request=request,
                epoch=answer.epoch,
                pages=answer.promise.pages,
                state=SequenceState.LOADING,
                prompt_tokens=answer.asked.prompt_tokens,
                output_tokens=answer.delivered,
                max_tokens=answer.max_tokens,
                digest=answer.digest,
                gateway=GATEWAY,
            )

    def entry(self, entry: EngineSequenceReport) -> RunnerRequest:
        answer = self._accepted[entry.request]
        return RunnerRequest(
            request=entry.request,
            epoch=entry.epoch,
            pages=entry.promise,
            pages_used=entry.pages_used,
            state=_STATES[entry.state],
            prompt_tokens=entry.prompt_tokens,
            output_tokens=entry.output_tokens,
            max_tokens=answer.max_tokens,
            digest=entry.adapter,
            request_class=RequestClass(entry.priority),
            parked_times=entry.parked_times,
            gateway=GATEWAY,
            charged_pages=0 if entry.charged_pages is None else max(1, entry.charged_pages),
            promise_number=entry.promise_number,
        )
