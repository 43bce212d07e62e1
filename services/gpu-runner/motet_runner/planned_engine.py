"""The common part of all engines with the real planner: commands and reports.

Subclasses add `step` and `idle`, with a model, a function, or a simulation of iterations. No torch.
"""

from dataclasses import replace

from motet.domain import Digest, ParkMethod, RequestId
from motet.errors import AdapterError, StructuredOutputUnavailable
from motet.ledger import check_overcommit
from motet.prefix_hints import MAX_CACHED_HINTS
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.proof import ProofOrder
from motet_runner.interface import (
    EngineAdapterReport,
    EngineInfo,
    EngineReport,
    NewSequence,
    ProofEnded,
    SlabWritten,
    State,
)
from motet_runner.plan import Planner
from motet_runner.row_mask import RowMask
from motet_runner.step_costs import StepCosts


class PlannedEngine:
    """See `motet_runner.interface.Engine` for what each call promises."""

    info: EngineInfo
    planner: Planner
    costs: StepCosts

    @property
    def steps(self) -> int:
        """The number of iterations that a report gives"""
        return self.planner.steps

    def add(self, sequence: NewSequence) -> None:
        if sequence.bound and sequence.mask is None:
            sequence = replace(sequence, mask=self.mask_of(sequence))
        self.planner.commands.add(sequence)

    def cancel(self, request: RequestId, epoch: int | None = None) -> int:
        gone = self.planner.commands.cancel(request, epoch)
        return gone.promise_number if gone is not None else 0

    def extend(self, request: RequestId, epoch: int, promise: int, extended: int, *, number: int = 0) -> bool:
        return self.planner.commands.extend(request, epoch, promise, extended, number=number)

    def park(
        self, request: RequestId, epoch: int, promise: int, wanted: int, method: ParkMethod, *, number: int = 0
    ) -> bool:
        return self.planner.commands.park(request, epoch, promise, wanted, method, number=number)

    def resume(self, request: RequestId, epoch: int, promise: int, *, number: int = 0) -> bool:
        return self.planner.commands.resume(request, epoch, promise, number=number)

    def set_supervised(self, supervised: bool) -> None:
        self.planner.commands.supervised = supervised

    def set_overcommit(self, factor: float) -> None:
        check_overcommit(factor)
        self.planner.commands.set_overcommit(factor)

    def load_adapter(
        self,
        digest: Digest,
        layout: AdapterLayout,
        *,
        pinned: bool = False,
        proof: ProofOrder | None = None,
    ) -> None:
        if proof is not None and not self._proves(proof):
            refused = ProofEnded(proof.number, digest, AdapterError("This engine proves no adapters."))
            self.planner.sequences.events.append(refused)
            proof = None
        self.planner.commands.load_adapter(digest, layout, pinned=pinned, proof=proof)

    def _proves(self, order: ProofOrder) -> bool:
        return self.info.proves or not order.linears

    def mask_of(self, sequence: NewSequence) -> RowMask:  # noqa: ARG002
        raise StructuredOutputUnavailable("This engine serves no structured output.")

    def drop_adapter(self, digest: Digest) -> None:
        self.planner.commands.drop_adapter(digest)

    def write_slab(self, number: int, layout: AdapterLayout) -> None:  # noqa: ARG002
        self.planner.sequences.events.append(SlabWritten(number, 0))

    def slabs_written(self) -> list[SlabWritten]:
        return []

    def has_work(self) -> bool:
        return self.planner.has_work()

    def report(self) -> EngineReport:
        sequences, memory, costs = self.planner.sequences, self.planner.memory, self.costs
        charges = {} if memory.ledger.charges_all_whole else memory.charges()
        live = {digest: sequences.live_on(digest) for digest in sequences.live_adapters()}
        fixed, each = costs.decode_law()
        return EngineReport(
            steps=self.steps,
            pages=memory.ledger.kv_pages,
            pages_free=memory.free,
            pages_promised=sum(charges.values()) if charges else memory.ledger.promised,
            running=sequences.count(State.PREFILL, State.DECODE),
            waiting=sequences.count(State.WAITING, State.LOADING),
            parked=sequences.count(State.PARKED),
            pending_prefill_tokens=sum(one.to_schedule for one in sequences if not one.decodes),
            host_bytes_free=memory.host.free * self.info.page_bytes,
            step_seconds=costs.step_seconds,
            prefill_seconds_per_token=costs.prefill_seconds_per_token,
            swap_seconds_per_page=costs.swap_seconds_per_page,
            sequences=[one.entry(charges.get(one.request)) for one in sequences],
            adapters=[
                EngineAdapterReport(digest, known.layout.size, live.get(digest, 0), known.arrived)
                for digest, known in memory.adapters.on_device_or_in(live)
            ],
            prefix_queried_tokens=memory.cache.queried_tokens,
            prefix_hit_tokens=memory.cache.hit_tokens,
            prefix_pages=len(memory.cache),
            cached_prefixes=tuple(memory.cached_hints(MAX_CACHED_HINTS)),
            host_adapters=memory.adapters.host.adapters,
            host_adapter_bytes=memory.adapters.host.bytes,
            fixed_seconds=fixed,
            sequence_seconds=each,
            batch_cap=self.planner.cap.report() if self.planner.cap is not None else None,
        )

    def free_share(self) -> float:
        return self.planner.memory.free_share

    def check(self) -> None:
        """Recount everything; raises AssertionError with the numbers."""
        self.planner.check()
