"""What a tenant gets is bounded by what it is granted, also if schedulers start again.

Those that were let in are counted. Each may take what is there and leave a debt, so the bound is the grant of the time
that has passed, the depth of a bucket and one more. At each start of a scheduler it is higher by the last two, as those
may have died who knew what is left. Who comes in before a new scheduler has heard of limits is not counted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

from motet.quotas import BUCKET_SECONDS
from motet_scheduler.service import SchedulerService
from motet_simulator.trials.clients import Client
from motet_simulator.trials.plan import Grant

LAG_SECONDS = 5.0
"""How long after its placement a client may hear of it: messages are slow, and processes pause."""


class GrantChecks:
    def __init__(self, grants: Sequence[Grant]) -> None:
        self._rates = {grant.tenant: grant.requests_per_minute / 60 for grant in grants if grant.requests_per_minute}
        self._seen: set[str] = set()
        self._let_in: Counter[str] = Counter()
        self._terms: set[int] = set()
        self._unknown_at = -inf
        """When a scheduler led last that did not know limits."""

    def check(self, clients: Sequence[Client], schedulers: Mapping[str, SchedulerService], now: float) -> None:
        """Raises AssertionError."""
        terms = {service.term for service in schedulers.values()}
        known = all(service.scheduler.state.catalog_known for service in schedulers.values())
        if not known or not terms or terms - self._terms:
            self._unknown_at = now
        self._terms |= terms
        for client in clients:
            if client.placed_times and client.ask.name not in self._seen:
                self._seen.add(client.ask.name)
                self._let_in[client.ask.tenant] += now - self._unknown_at > LAG_SECONDS
        for tenant, rate in self._rates.items():
            most = rate * now + max(1, len(self._terms)) * (rate * BUCKET_SECONDS + 1)
            let_in = self._let_in[tenant]
            assert let_in <= most, f"{let_in} requests of {tenant} were let in, and at most {most:.1f} were granted"
