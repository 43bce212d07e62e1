"""Orca's selection: composer and ledger choose what the paper's Algorithm 1 chooses, on random traces (OR-06).

`Reference` is the algorithm, written from its description and from nothing of ours. A slot is a page here, so that both
count alike; a request's `max_tokens` is the promise for prompt and `max_tokens`.
"""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.domain import PAGE_TOKENS, RequestId
from motet.errors import Declined
from motet.ledger import Ledger
from motet.promises import max_pages, pages_by_rule
from motet_runner.interface import State
from motet_runner.plan import PRESETS, Iteration, Sequence, compose
from motet_runner.plan.joining import choose
from tests.runner.plan.fake_device import FakeDevice, make_planner, new

CONTEXT = 160
SLOTS = 12
"""Pages: more than any one request needs, less than several."""


@dataclass(frozen=True)
class Trace:
    """Requests by arrival, each with the iteration before which it arrives."""

    requests: tuple[tuple[int, int, int, int], ...]
    """Prompt tokens, `max_tokens`, true output tokens, rounds since the request before."""
    max_bs: int
    workers: int = 1

    def arriving(self) -> list[list[str]]:
        rounds: list[list[str]] = []
        at = 0
        for index, (*_, gap) in enumerate(self.requests):
            at += gap
            rounds += [[] for _ in range(at + 1 - len(rounds))]
            rounds[at].append(name(index))
        return rounds

    def slots(self, request: str) -> int:
        prompt, max_tokens, *_ = self.requests[index_of(request)]
        return max_pages(prompt, max_tokens, page_tokens=PAGE_TOKENS)

    def iterations(self, request: str) -> int:
        return self.requests[index_of(request)][2]


def name(index: int) -> str:
    return f"r{index:03}"


def index_of(request: str) -> int:
    return int(request[1:])


@st.composite
def traces(draw: st.DrawFn, most_workers: int = 1) -> Trace:
    requests = []
    for _ in range(draw(st.integers(1, 14))):
        max_tokens = draw(st.integers(1, 80))
        length = draw(st.integers(1, max_tokens))
        requests.append((draw(st.integers(1, 80)), max_tokens, length, draw(st.integers(0, 6))))
    return Trace(tuple(requests), draw(st.integers(1, 5)), draw(st.integers(1, most_workers)))


@dataclass
class Reference:
    """The paper's Algorithm 1."""

    trace: Trace
    pool: list[str] = field(default_factory=list)
    phase: dict[str, str] = field(default_factory=dict)
    ran: dict[str, int] = field(default_factory=dict)
    n_rsrv: int = 0

    def arrive(self, request: str) -> None:
        self.pool.append(request)
        self.phase[request] = "initiation"
        self.ran[request] = 0

    def select(self) -> list[str]:
        batch: list[str] = []
        for request in [one for one in self.pool if self.phase[one] != "running"]:
            if len(batch) == self.trace.max_bs:
                break
            if self.phase[request] == "initiation":
                if self.n_rsrv + self.trace.slots(request) > SLOTS:
                    break
                self.n_rsrv += self.trace.slots(request)
            batch.append(request)
        for request in batch:
            self.phase[request] = "running"
            self.ran[request] += 1
        return batch

    def returns(self, batch: list[str]) -> None:
        for request in batch:
            self.phase[request] = "increment"
            if self.ran[request] == self.trace.iterations(request):
                self.pool.remove(request)
                self.n_rsrv -= self.trace.slots(request)


class Ours:
    """Composer and ledger under the preset `orca`, with several batches in flight.

    As in Orca, a sequence in flight cannot be chosen: it is not handed to the composer.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ledger: Ledger[RequestId] = Ledger(SLOTS)
        self.waiting: list[Sequence] = []
        self.started: list[Sequence] = []
        self.in_flight: set[str] = set()
        self.arrivals = 0

    def arrive(self, request: str) -> None:
        prompt, max_tokens, length, _ = self.trace.requests[index_of(request)]
        promise = pages_by_rule(
            PRESETS["orca"].promise, prompt, max_tokens, context_tokens=CONTEXT, page_tokens=PAGE_TOKENS
        )
        added = new(request, prompt=prompt, max_tokens=length, promise=promise)
        self.arrivals += 1
        self.waiting.append(
            Sequence(
                new=added,
                arrival=self.arrivals,
                promise=promise,
                tokens=list(added.prompt),
                state=State.WAITING,
                page_tokens=PAGE_TOKENS,
            )
        )

    def select(self) -> Iteration:
        selectable = [sequence for sequence in self.started if sequence.request not in self.in_flight]
        places = self.trace.max_bs - len(selectable)
        joining = choose(self.waiting, PRESETS["orca"], places=places, pages=self.ledger.free)
        for sequence in joining:
            assert self.ledger.promise(sequence.request, sequence.promise) is None
            self.waiting.remove(sequence)
        self.started += joining
        places = self.trace.max_bs
        iteration = compose(selectable + joining, PRESETS["orca"], chunk_tokens=1, places=places)
        iteration.begin()
        self.in_flight |= {work.sequence.request for work in iteration.work}
        return iteration

    def returns(self, iteration: Iteration) -> None:
        for work in iteration.work:
            sequence = work.sequence
            self.in_flight.remove(sequence.request)
            sequence.scheduled += work.count
            sequence.tokens.append(0)
            if sequence.output_tokens == sequence.new.sampling.max_tokens:
                self.started.remove(sequence)
                self.ledger.release(sequence.request)


def names(iteration: Iteration) -> list[str]:
    return sorted(work.sequence.request for work in iteration.work)


@given(traces(most_workers=4))
def test_composer_and_ledger_choose_what_the_algorithm_chooses(trace: Trace) -> None:
    reference, ours = Reference(trace), Ours(trace)
    in_flight: deque[tuple[list[str], Iteration]] = deque()
    arriving = deque(trace.arriving())
    while arriving or reference.pool:
        for request in arriving.popleft() if arriving else []:
            reference.arrive(request)
            ours.arrive(request)
        batch, iteration = reference.select(), ours.select()
        assert names(iteration) == batch
        assert ours.ledger.promised == reference.n_rsrv
        if batch:
            in_flight.append((batch, iteration))
        assert in_flight or not reference.pool, "somebody waits, and nothing runs"
        if in_flight and (len(in_flight) == trace.workers or not batch):
            batch, iteration = in_flight.popleft()
            reference.returns(batch)
            ours.returns(iteration)
    assert not ours.waiting
    assert not ours.started
    assert ours.ledger.promised == 0


@settings(max_examples=40)
@given(traces())
def test_a_runner_that_is_sent_requests_by_arrival_runs_what_the_algorithm_runs(trace: Trace) -> None:
    """The same through a whole plan: the scheduler sends requests in order and waits when one is declined."""
    reference = Reference(trace)
    planner = make_planner(pages=SLOTS, preset="orca", places=trace.max_bs)
    device = FakeDevice(planner)
    queue: deque[str] = deque()
    arriving = deque(trace.arriving())
    while arriving or reference.pool:
        for request in arriving.popleft() if arriving else []:
            reference.arrive(request)
            queue.append(request)
        while queue:
            prompt, _, length, _ = trace.requests[index_of(queue[0])]
            try:
                planner.commands.add(new(queue[0], prompt=prompt, max_tokens=length, promise=trace.slots(queue[0])))
            except Declined:
                break
            queue.popleft()
        batch = reference.select()
        assert device.requests(device.step().rows) == batch
        reference.returns(batch)
    assert not len(planner.sequences)


@given(traces(most_workers=4))
def test_an_earlier_request_has_run_at_least_as_many_iterations(trace: Trace) -> None:
    """OR-07, also with several batches in flight, and in the algorithm as well as in ours."""
    ours = Ours(trace)
    in_flight: deque[Iteration] = deque()
    arriving = deque(trace.arriving())
    ran: dict[str, int] = {}
    while arriving or ours.waiting or ours.started:
        for request in arriving.popleft() if arriving else []:
            ours.arrive(request)
            ran[request] = 0
        iteration = ours.select()
        for request in names(iteration):
            ran[request] += 1
        live = [ran[sequence.request] for sequence in ours.started + ours.waiting]
        assert live == sorted(live, reverse=True)
        if iteration:
            in_flight.append(iteration)
        if in_flight and (len(in_flight) == trace.workers or not iteration):
            ours.returns(in_flight.popleft())


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_request_without_slots_holds_back_a_smaller_one_behind_it(workers: int) -> None:
    trace = Trace(((60, 60, 60, 0), (60, 80, 5, 0), (1, 1, 1, 0)), max_bs=4, workers=workers)
    ours = Ours(trace)
    for request in trace.arriving()[0]:
        ours.arrive(request)
    assert names(ours.select()) == ["r000"]
    assert names(ours.select()) == []
