"""The supervisor's figures."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from motet.levels import LevelsByInstance
from motet_supervisor.policy.supervisor import Supervisor


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.overflows = Counter(
            "motet_supervisor_overflows_total",
            "Overflows that runners reported: sequences one KV page away from the end of their promise.",
            registry=registry,
        )
        self.extensions = Counter(
            "motet_promise_extensions_total",
            "Promises that were made larger while their request went on.",
            registry=registry,
        )
        self.park_orders = Counter(
            "motet_park_orders_total",
            "Orders to park a request, because a promise was too short and no page was free, by what happens to the"
            " request's KV: swap (copied to host memory) or recompute (dropped).",
            ["method"],
            registry=registry,
        )
        self.resume_orders = Counter(
            "motet_resume_orders_total", "Orders to resume a parked request.", registry=registry
        )
        self.runners_lost = Counter(
            "motet_runners_unhealthy_total",
            "Times that a runner was found unhealthy: its engine has work and takes no step (hung), or it sends"
            " no reports (silent).",
            ["reason"],
            registry=registry,
        )
        self.watched = Gauge(
            "motet_watched_runners", "Runners that are connected to the supervisor.", registry=registry
        )
        self.free = Gauge(
            "motet_unpromised_pages",
            "KV pages of each runner that are promised to no request.",
            ["instance"],
            registry=registry,
        )
        self.parked = Gauge("motet_parked_requests", "Parked requests of each runner.", ["instance"], registry=registry)
        self.overcommit = Gauge(
            "motet_pool_overcommit",
            "Promises on a pool's runners may add up to their KV pages times this. It falls while more than"
            " one in twenty of the requests that end was parked.",
            ["pool_namespace", "pool"],
            registry=registry,
        )
        self._of_runners = LevelsByInstance(self.free, self.parked)

    def observe(self, supervisor: Supervisor) -> None:
        """Take the levels, now and then."""
        self.watched.set(sum(runner.connected for runner in supervisor.runners.values()))
        self.overcommit.clear()
        for pool in {runner.identity.pool for runner in supervisor.runners.values()}:
            namespace, _, name = pool.partition("/")
            self.overcommit.labels(namespace, name).set(supervisor.overcommit_of(pool).factor)
        self._of_runners.show(
            (runner.instance, (runner.ledger.free, runner.parked_requests)) for runner in supervisor.runners.values()
        )
