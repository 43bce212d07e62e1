"""Measures how exactly quotas hold, in virtual time: ten minutes over every limit, with two gateways, while the
scheduler is killed twice.

The policy of production decides, and messages of production carry what gateways tell a new scheduler. Three tenants
send more than their limit of requests a minute, of tokens a minute, or of requests at once, at random times. A fourth
does so by an adapter and an API key, which have limits of their own below the tenant's, and by neither. The clients of
others come again when they are told to, and up to `WAY_SECONDS` later. Answers are longer or shorter than their
estimates.

`quota_error` is the difference between what was let in, or computed, and what was granted, after the first minute, of
each account: who is refused by one draws from none. `retry_error` is the difference between what a client was told to
wait and how long it waited until it came in, for 99 of 100 clients. `retry_error_killed` is the same for those whom a
scheduler told that was killed before they came: gateways tell the next one of them. Who was to come while no scheduler
ran, for a second after each kill, can come in only once the next one runs: its wait counts from there.

    python -m benchmarks.quotas [--minutes 10] [--json]
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from benchmarks.harness import Result, arguments, percentile, report
from motet.api.v1 import scheduler_pb2
from motet.clock import FakeClock
from motet.domain import BASE, Digest, InstanceName, RequestId, Tenant
from motet.runner_info import Capacity, RunnerIdentity, Tier
from motet_gateway.account_levels import AccountLevels
from motet_scheduler import conversion
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import (
    AdapterRef,
    AdapterSpec,
    Estimate,
    GroupName,
    KeyAccount,
    Limits,
    PoolSpec,
    Promise,
    RevisionKey,
    SchedulerConfig,
)

GROUP = GroupName("pools/demo")
CAPACITY = Capacity(pages=1 << 20, max_sequences=1 << 16)
LIMITS = {
    "requests": Limits(requests_per_minute=600),
    "tokens": Limits(tokens_per_minute=120_000),
    "concurrency": Limits(concurrency=16),
    "nested": Limits(requests_per_minute=900),
    "requests_again": Limits(requests_per_minute=600),
    "tokens_again": Limits(tokens_per_minute=180_000),
    "nested_again": Limits(requests_per_minute=600),
}
POOL = PoolSpec(pool="pools/demo", group=GROUP, limits=tuple(sorted(LIMITS.items())))
RUNNER = RunnerIdentity(instance="r0", incarnation="1", pool="pools/demo", group=GROUP)
GATEWAYS = ("g0", "g1")

WARMUP_SECONDS = 60.0
DOWN_SECONDS = 1.0
OPEN_RATE = 20.0
"""Requests a second of each of `OPEN`. They never come again."""

OBEDIENT = 100
"""Clients of each of `AGAIN`, which come again when they are told to, and a second after each answer."""

WAY_SECONDS = 0.05
RETRIES = 0.99
"""The share of clients for which `retry_error` holds."""

KILLED = "killed"

PROMPT, ANSWER, MAX_TOKENS = 100, 200, 2000
STEP_SECONDS = 0.02
TARGET_QUOTA, TARGET_RETRY = 1.0, 20.0


class Source(NamedTuple):
    """Where requests come from."""

    tenant: str
    adapter: str = ""
    key: KeyAccount | None = None


DIGEST = Digest("sha256:" + "a" * 64)
ADAPTER = AdapterSpec(
    ref=AdapterRef("nested", "tight", 1),
    group=GROUP,
    model_name="tight",
    revision=RevisionKey(source="file:///adapters/tight"),
    limits=Limits(tokens_per_minute=40_000),
)
KEY = KeyAccount("k0", Limits(requests_per_minute=150))
KEY_AGAIN = KeyAccount("k1", Limits(requests_per_minute=200))
BY_ADAPTER, BY_KEY = Source("nested", str(ADAPTER.ref.object)), Source("nested", key=KEY)
OPEN = (Source("requests"), Source("tokens"), Source("concurrency"), Source("nested"), BY_ADAPTER, BY_KEY)
AGAIN = (
    Source("requests_again"),
    Source("tokens_again"),
    Source("nested_again"),
    Source("nested_again", key=KEY_AGAIN),
)


@dataclass
class Client:
    """One that comes again."""

    source: Source
    number: int
    refused_at: float = 0.0
    told_by: Scheduler | None = None
    told: float = 0.0
    """Seconds, when it was refused first. 0: it was not."""
    lengths: tuple[int, int] | None = None
    """Of the answer that it wants, and as estimated. It wants the same again."""


@dataclass
class Ask:
    name: str
    source: Source
    gateway: str
    answer: int
    estimate: int
    at: float
    client: Client | None
    admitted: bool = False
    epoch: int = 0
    placed_at: float = -1.0

    @property
    def digest(self) -> Digest:
        return DIGEST if self.source.adapter else BASE

    def event(self, now: float) -> events.Enqueued:
        return events.Enqueued(
            gateway=self.gateway,
            request=RequestId(self.name),
            tenant=Tenant(self.source.tenant),
            group=GROUP,
            digest=self.digest,
            adapter=self.source.adapter,
            api_key=self.source.key,
            prompt_tokens=PROMPT,
            max_tokens=MAX_TOKENS,
            prefix_hints=(self.client.number,) if self.client is not None else (),
            epoch=self.epoch,
            age=now - self.at,
            estimate=Estimate(q50=self.estimate, q80=self.estimate, q90=self.estimate, q95=self.estimate),
            admitted=self.admitted,
        )


@dataclass
class World:
    seconds: float
    kills: tuple[float, ...]
    clock: FakeClock = field(default_factory=lambda: FakeClock(1000.0))

    def __post_init__(self) -> None:
        self.began = self.clock()
        self.chance = random.Random(1)
        self._numbers = count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self.levels = {name: AccountLevels(self.clock) for name in GATEWAYS}
        self.asks: dict[str, Ask] = {}
        self.scheduler: Scheduler | None = None
        self.let_in: Counter[Source] = Counter()
        self.computed: Counter[Source] = Counter()
        self.place_seconds: defaultdict[Source, float] = defaultdict(float)
        self.retries: defaultdict[Source | str, list[float]] = defaultdict(list)
        """By how much more or less than told clients waited, in percent. `KILLED`: of all whom none knows that runs."""

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        heappush(self._due, (self.clock() + seconds, next(self._numbers), do))

    def run(self) -> None:
        self.start_scheduler(1)
        for source in OPEN:
            self.later(0.0, partial(self.arrive, source))
        for source in AGAIN:
            for number in range(OBEDIENT):
                self.later(self.chance.random(), partial(self.ask, source, Client(source, number)))
        for number, kill in enumerate(self.kills, 2):
            self.later(kill, self.kill)
            self.later(kill + DOWN_SECONDS, partial(self.start_scheduler, number))
        end = self.began + self.seconds
        while True:
            due = self._due[0][0]
            tick = self.scheduler.next_due() if self.scheduler is not None else due
            if min(due, tick) >= end:
                self.clock.advance(end - self.clock())
                for ask in self.asks.values():
                    if ask.placed_at >= 0:
                        self.count_place(ask)
                return
            self.clock.advance(max(0.0, min(due, tick) - self.clock()))
            if tick < due:
                self.handle(events.Tick())
            else:
                heappop(self._due)[2]()

    # ------------------------------------------------------------------------------------------------- the scheduler

    def kill(self) -> None:
        self.scheduler = None

    def start_scheduler(self, number: int) -> None:
        self.scheduler = Scheduler(SchedulerConfig(), now=self.clock(), first_order=number << 32)
        self.handle(events.CatalogReplaced((POOL,), (ADAPTER,)))
        resident = {DIGEST: Tier.DEVICE}
        self.handle(events.RunnerAttached(identity=RUNNER, address="r0", capacity=CAPACITY, resident=resident))
        for gateway in GATEWAYS:
            own = [ask for ask in self.asks.values() if ask.gateway == gateway]
            live = tuple(self.live(ask) for ask in own if ask.placed_at >= 0)
            self.handle(events.GatewayConnected(gateway, live))
            for message in self.levels[gateway].messages():
                read = conversion.serve_event(gateway, scheduler_pb2.ServeUp.FromString(message.SerializeToString()))
                assert read is not None
                self.handle(read)
            for ask in own:
                if ask.placed_at < 0:
                    self.handle(ask.event(self.clock()))

    def live(self, ask: Ask) -> events.LiveRequest:
        return events.LiveRequest(
            request=RequestId(ask.name),
            epoch=ask.epoch,
            instance=InstanceName("r0"),
            incarnation="1",
            promise=Promise(4),
            tenant=Tenant(ask.source.tenant),
            group=GROUP,
            digest=ask.digest,
            adapter=ask.source.adapter,
            api_key=ask.source.key,
            prompt_tokens=PROMPT,
            max_tokens=MAX_TOKENS,
            estimate=ask.event(self.clock()).estimate,
        )

    def handle(self, event: events.Event) -> None:
        if self.scheduler is None:
            return
        for effect in self.scheduler.handle(event, self.clock()):
            match effect:
                case effects.SendPlaced():
                    self.levels[effect.gateway].note_placed(conversion.place(effect, 1).placed)
                    self.placed(self.asks[effect.request], effect.epoch)
                case effects.SendRefused():
                    self.levels[effect.gateway].note_refused(conversion.refuse(effect, 1).refused)
                    self.refused(self.asks.pop(effect.request), effect.failure.retry_after)
                case effects.SendPosition():
                    self.asks[effect.request].admitted |= effect.admitted
        if self.scheduler is not None and self.scheduler.more_to_try:
            self.handle(events.TryMore())

    # --------------------------------------------------------------------------------------------------- the clients

    @property
    def counts(self) -> bool:
        return self.clock() - self.began >= WARMUP_SECONDS

    def arrive(self, source: Source) -> None:
        self.ask(source, None)
        self.later(self.chance.expovariate(OPEN_RATE), lambda: self.arrive(source))

    def ask(self, source: Source, client: Client | None) -> None:
        number = next(self._numbers)
        answer = min(MAX_TOKENS, 1 + int(self.chance.expovariate(1 / ANSWER)))
        estimate = int(ANSWER * self.chance.uniform(1.0, 3.5))
        if client is not None:
            client.lengths = answer, estimate = client.lengths or (answer, estimate)
        ask = Ask(f"{source.tenant}-{number}", source, GATEWAYS[number % 2], answer, estimate, self.clock(), client)
        self.asks[ask.name] = ask
        self.handle(ask.event(self.clock()))

    def placed(self, ask: Ask, epoch: int) -> None:
        ask.epoch, ask.placed_at, ask.admitted = epoch, self.clock(), True
        self.let_in[ask.source] += self.counts
        if (client := ask.client) is not None:
            if self.counts and client.told:
                of = ask.source if client.told_by is self.scheduler else KILLED
                due = self.with_a_scheduler(client.refused_at + client.told)
                self.retries[of].append(100 * abs(self.clock() - due) / client.told)
            client.told, client.lengths = 0.0, None
        self.later(ask.answer * STEP_SECONDS, lambda: self.finish(ask))

    def with_a_scheduler(self, due: float) -> float:
        """The first time from then on at which a scheduler runs"""
        for kill in self.kills:
            if 0 <= due - self.began - kill < DOWN_SECONDS:
                return self.began + kill + DOWN_SECONDS
        return due

    def finish(self, ask: Ask) -> None:
        del self.asks[ask.name]
        if self.counts:
            self.computed[ask.source] += PROMPT + ask.answer
        self.count_place(ask)
        self.handle(events.RequestFinished(ask.gateway, RequestId(ask.name), ask.epoch, ask.answer))
        if (client := ask.client) is not None:
            self.later(1.0 + self.way(), lambda: self.ask(client.source, client))

    def count_place(self, ask: Ask) -> None:
        since = max(ask.placed_at, self.began + WARMUP_SECONDS)
        self.place_seconds[ask.source] += max(0.0, self.clock() - since)

    def refused(self, ask: Ask, seconds: float) -> None:
        if (client := ask.client) is not None:
            if not client.told:
                client.refused_at, client.told, client.told_by = self.clock(), seconds, self.scheduler
            self.later(seconds + self.way(), lambda: self.ask(client.source, client))

    def way(self) -> float:
        """Seconds that a client takes longer than it should."""
        return self.chance.uniform(0.0, WAY_SECONDS)


def measure(minutes: float) -> list[Result]:
    seconds = 60 * minutes
    world = World(seconds, (seconds / 3, seconds * 2 / 3))
    world.run()
    granted = minutes - WARMUP_SECONDS / 60
    nested = sum(let_in for source, let_in in world.let_in.items() if source.tenant == "nested")
    shares = {
        "requests": world.let_in[OPEN[0]] / (LIMITS["requests"].requests_per_minute * granted),
        "tokens": world.computed[OPEN[1]] / (LIMITS["tokens"].tokens_per_minute * granted),
        "concurrency": world.place_seconds[OPEN[2]] / (LIMITS["concurrency"].concurrency * granted * 60),
        "nested": nested / (LIMITS["nested"].requests_per_minute * granted),
        "adapter": world.computed[BY_ADAPTER] / (ADAPTER.limits.tokens_per_minute * granted),
        "key": world.let_in[BY_KEY] / (KEY.limits.requests_per_minute * granted),
    }
    settings = {"minutes": minutes}
    results = [
        Result(
            f"quota_error_{name}",
            value := 100 * abs(share - 1),
            "%",
            f"<= {TARGET_QUOTA:g} %",
            value <= TARGET_QUOTA,
            counted=True,
            settings=settings,
        )
        for name, share in shares.items()
    ]
    retries: dict[str, Source | str] = {KILLED: KILLED}
    retries |= {source.tenant.partition("_")[0] if source.key is None else "key": source for source in AGAIN}
    for name, source in retries.items():
        value, target = percentile(world.retries[source], RETRIES), f"<= {TARGET_RETRY:g} %"
        results.append(
            Result(f"retry_error_{name}", value, "%", target, value <= TARGET_RETRY, counted=True, settings=settings)
        )
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="virtual time")
    given = parser.parse_args()
    report("quotas", measure(given.minutes), as_json=given.json)


if __name__ == "__main__":
    main()
