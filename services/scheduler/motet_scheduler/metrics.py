"""The scheduler's figures."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from motet.runner_info import RequestClass
from motet_scheduler.policy.autoscaler import PoolFigures
from motet_scheduler.policy.scheduler import Scheduler


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.placements = Counter(
            "motet_placements_total", "Requests placed on a runner, again after a loss included.", registry=registry
        )
        self.moves = Counter("motet_moves_total", "Running requests that were placed elsewhere.", registry=registry)
        self.refusals = Counter("motet_refusals_total", "Requests refused, by code.", ["code"], registry=registry)
        self.losses = Counter("motet_lost_placements_total", "Placements that a gateway gave up.", registry=registry)
        self.declines = Counter(
            "motet_placement_declines_total", "Placements that a runner declined.", registry=registry
        )
        self.failures = Counter(
            "motet_scheduler_failures_total",
            "Events on which deciding failed: each time the scheduler began anew.",
            registry=registry,
        )
        self.readmissions = Counter(
            "motet_resumes_allowed_total", "Parked requests let back in by the ledger.", registry=registry
        )
        self.decision_seconds = Histogram(
            "motet_scheduler_decision_seconds",
            "Time to decide what follows from one event.",
            buckets=[1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 2.5e-2, 0.1, 1.0],
            registry=registry,
        )
        self.queued = Gauge("motet_queued_requests", "Requests that wait for a place.", ["class"], registry=registry)
        self.known = Gauge("motet_known_requests", "Requests waiting or placed.", registry=registry)
        self.runners = Gauge("motet_attached_runners", "Runners whose stream is up.", registry=registry)
        self.pages = Gauge("motet_ledger_pages", "Pages that runners have.", ["instance"], registry=registry)
        self.promised = Gauge(
            "motet_ledger_promised_pages", "Pages promised to requests.", ["instance"], registry=registry
        )
        self.parked = Gauge(
            "motet_ledger_parked_requests", "Requests that wait to come back.", ["instance"], registry=registry
        )
        # Two labels, since a selector of Kubernetes cannot ask for a value with a slash in it.
        pool = ["pool_namespace", "pool"]
        self.desired = Gauge(
            "motet_pool_desired_replicas", "Runners that a pool should have, as advised.", pool, registry=registry
        )
        self.serving = Gauge("motet_pool_serving_runners", "Runners of a pool that take work.", pool, registry=registry)
        self.pool_running = Gauge(
            "motet_pool_running_requests", "Requests placed on a pool's runners.", pool, registry=registry
        )
        self.pool_waiting = Gauge(
            "motet_pool_waiting_requests", "Requests that wait for a place on a pool.", pool, registry=registry
        )
        self.pool_held = Gauge(
            "motet_pool_held_requests",
            "Requests that gateways hold because a pool has had no runner yet.",
            pool,
            registry=registry,
        )
        self.pool_used = Gauge(
            "motet_pool_kv_used_ratio",
            "Share of a pool's KV pages that hold something, 0 to 1.",
            pool,
            registry=registry,
        )
        self.pool_promised = Gauge(
            "motet_pool_kv_promised_ratio",
            "KV pages promised to requests, as a share of a pool's; overcommitted above 1.",
            pool,
            registry=registry,
        )
        self._pools: Mapping[str, PoolFigures] | None = None
        self.term = Gauge("motet_scheduler_term", "The term this scheduler leads in.", registry=registry)

    def observe(self, scheduler: Scheduler) -> None:
        """Take the levels, now and then."""
        self.known.set(len(scheduler.requests))
        self.runners.set(sum(runner.attached for runner in scheduler.runners.values()))
        for one in RequestClass:
            waiting = sum(queue.size_of(one) for queue in scheduler.queues.values())
            self.queued.labels(one.name.lower()).set(waiting)
        self._observe_pools(scheduler.capacity.figures)
        for gauge in (self.pages, self.promised, self.parked):
            gauge.clear()
        for runner in scheduler.runners.values():
            self.pages.labels(runner.instance).set(runner.capacity.pages)
            self.promised.labels(runner.instance).set(runner.ledger.promised)
            self.parked.labels(runner.instance).set(len(runner.parked))

    def _observe_pools(self, pools: Mapping[str, PoolFigures]) -> None:
        if pools is self._pools:
            return  # nobody has looked since
        self._pools = pools
        of_a_pool: tuple[tuple[Gauge, Callable[[PoolFigures], float]], ...] = (
            (self.desired, lambda it: it.desired),
            (self.serving, lambda it: it.serving),
            (self.pool_running, lambda it: it.running),
            (self.pool_waiting, lambda it: it.waiting),
            (self.pool_held, lambda it: it.held),
            (self.pool_used, lambda it: it.pages_used / max(it.pages, 1)),
            (self.pool_promised, lambda it: it.pages_promised / max(it.pages, 1)),
        )
        for gauge, value in of_a_pool:
            gauge.clear()  # of pools that are no more
            for name, figures in pools.items():
                namespace, _, pool = name.partition("/")
                gauge.labels(namespace, pool).set(value(figures))
