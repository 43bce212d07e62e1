"""Random events while quotas apply, and change. The scheduler recounts its accounts after each event."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from motet_scheduler.policy import events
from motet_scheduler.policy.values import KeyAccount, Limits
from tests.scheduler.builders import adapter, pool
from tests.scheduler.test_random_events import RandomEvents

LIMITS = (
    Limits(),
    Limits(concurrency=1),
    Limits(requests_per_minute=60, concurrency=3),
    Limits(tokens_per_minute=6_000),
    Limits(requests_per_minute=6, tokens_per_minute=600, concurrency=2),
)
KEYS = (None, KeyAccount("one", Limits(concurrency=1)), KeyAccount("two", Limits(requests_per_minute=6)))


class RandomQuotas(RandomEvents):
    def __init__(self):
        super().__init__()
        self.limits_are_applied(LIMITS[2], LIMITS[1])

    @rule(of_tenants=st.sampled_from(LIMITS), of_adapter=st.sampled_from(LIMITS))
    def limits_are_applied(self, of_tenants, of_adapter):
        adapters = (adapter("pirate", max_replicas=1, limits=of_adapter), adapter("poet"))
        limits = (("*", of_tenants), ("a", LIMITS[3]))
        self.send(events.CatalogReplaced((pool(limits=limits),), adapters))

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 5))
    def some_come_with_a_key(self, key, count):
        for _ in range(count):
            self.enqueue_one(
                prompt=16, max_tokens=20, tenant="b", digest="", request_class=events.RequestClass.BATCH, api_key=key
            )

    @rule()
    def all_end_and_nobody_waits_for_a_quota(self):
        """Only for the rates: as long as these keep somebody out, there is a time at which he is tried."""
        if self.gateway_stream_broken:
            return
        while self.placed:
            name = min(self.placed)
            place = self.placed.pop(name)
            self.answered.add(name)
            self.runner_requests[place.instance].pop(name, None)
            self.send(events.RequestFinished("g0", name, place.epoch))
        state = self.driver.scheduler.state
        while self.driver.scheduler.more_to_try:
            self.send(events.TryMore())
        for request in state.requests.values():
            if request.held and not request.draw.charged:
                assert state.quotas.next_due() <= state.now + 70.0
            elif request.held:
                account = request.draw.waits_for
                taken = account.running + (account.kept_for is not None)
                assert taken >= account.limits.concurrency > 0


TestRandomQuotas = RandomQuotas.TestCase
TestRandomQuotas.settings = settings(max_examples=15)


@pytest.mark.soak
class TestManyRandomQuotas(RandomQuotas.TestCase):
    settings = settings(max_examples=1000)
