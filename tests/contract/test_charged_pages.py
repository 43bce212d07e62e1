"""Runner, scheduler and supervisor charge the same for promises that share pages.

The runner's ledger is the truth. What the others believe is never less, and the same after each report.
"""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.api.v1 import common_pb2
from motet.domain import InstanceName, RequestId
from motet.runner_info import RunnerRequest
from motet.shared_pages import charges
from motet_runner.plan.page_ledger import PageLedger
from motet_runner.plan.pages import PageAllocator
from motet_supervisor.policy import effects as supervisor_effects
from motet_supervisor.policy import events as supervisor_events
from tests.scheduler.builders import entry, ready
from tests.supervisor.builders import SupervisorDriver

PAGES = 100


@dataclass(frozen=True)
class Call:
    """Requests with a common prompt: its pages, and the promise of each of them."""

    prompt: int
    promises: tuple[int, ...]


FOUR_WITH_A_COMMON_PROMPT = Call(30, (34, 34, 34, 34))


class Parties:
    """The three of them, with the requests of some calls on one runner."""

    def __init__(self, *calls: Call) -> None:
        self.pages = PageAllocator(PAGES)
        self.ledger: PageLedger = PageLedger(self.pages, lambda: 0)
        self.held: dict[RequestId, list[int]] = {}
        self.scheduler = ready()
        self.scheduler.attach(pages=PAGES)
        self.supervisor = SupervisorDriver()
        self.supervisor.connect(pages=PAGES)
        for number, call in enumerate(calls):
            for choice, promise in enumerate(call.promises):
                self._begin(RequestId(f"{number}.{choice}"), RequestId(f"{number}.0"), call.prompt, promise)
        self.report()

    def _begin(self, name: RequestId, first: RequestId, prompt: int, promise: int) -> None:
        if first in self.held:
            shared = self.held[first][:prompt]
            self.pages.share(shared)
            self.held[name] = list(shared)
        else:
            self.held[name] = self.pages.take(prompt) or []
        self.ledger.adopt(name, promise)

    def charges(self) -> dict[RequestId, int]:
        return charges((name, self.ledger.promise_of(name), pages) for name, pages in self.held.items())

    def report(self) -> None:
        live = [self._reported(name, charged) for name, charged in self.charges().items()]
        self.scheduler.report("r0", *live)
        self.supervisor.report(*live)

    def _reported(self, name: RequestId, charged: int) -> RunnerRequest:
        """As it comes out of a message: there 0 would mean the whole promise."""
        return entry(name, self.ledger.promise_of(name), charged_pages=max(1, charged))

    def end(self, name: RequestId) -> None:
        self.pages.give(self.held.pop(name))
        self.ledger.release(name)
        self.scheduler.scheduler.runners[InstanceName("r0")].release_promise((name, 1))
        self.supervisor.send(supervisor_events.RequestEnded(InstanceName("r0"), name, 1))

    @property
    def promised(self) -> tuple[int, int, int]:
        return (
            self.ledger.promised,
            self.scheduler.scheduler.runners[InstanceName("r0")].ledger.promised,
            self.supervisor.supervisor.runners[InstanceName("r0")].ledger.promised,
        )


CALLS = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 4), min_size=1, max_size=3)).map(
        lambda drawn: Call(drawn[0], tuple(drawn[0] + more for more in drawn[1]))
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize(
    ("calls", "promised"),
    [
        ((FOUR_WITH_A_COMMON_PROMPT,), 46),
        ((Call(30, (34,)),), 34),
        ((Call(3, (5, 9)), Call(2, (4, 3, 3))), 5 + 6 + 4 + 1 + 1),
    ],
)
def test_all_three_charge_a_shared_page_once(calls, promised):
    parties = Parties(*calls)
    assert parties.promised == (promised,) * 3
    assert sum(parties.charges().values()) == promised


@given(calls=CALLS, data=st.data())
def test_after_every_report_all_agree_and_nobody_believes_less_than_the_runner(calls, data):
    parties = Parties(*calls)
    while parties.held:
        truth, *believed = parties.promised
        assert believed == [truth, truth]
        for _ in range(data.draw(st.integers(1, 2))):
            if parties.held:
                parties.end(data.draw(st.sampled_from(sorted(parties.held))))
            truth, *believed = parties.promised
            assert min(believed) >= truth
            assert len(set(believed)) == 1
        parties.report()


def test_a_runner_with_room_for_shared_pages_parks_nobody():
    parties = Parties(FOUR_WITH_A_COMMON_PROMPT)
    parties.supervisor.overflow(entry("0.3", 34, pages_used=34, prompt_tokens=480, output_tokens=64, charged_pages=4))
    assert not parties.supervisor.of(supervisor_effects.Park)
    (extend,) = parties.supervisor.of(supervisor_effects.Extend)
    assert extend.extended == 68
    assert parties.promised[2] == 46 + 34


def test_a_message_without_a_charge_is_charged_whole():
    whole = RunnerRequest.from_proto(common_pb2.RunnerRequest(request="a", epoch=1, promise={"pages": 7}))
    assert whole.pages_to_charge == 7
