"""The scheduler's figures."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from motet.levels import LevelsByInstance
from motet.runner_info import RequestClass
from motet_scheduler.policy.autoscaler import PoolFigures
from motet_scheduler.policy.scheduler import Scheduler


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.placements = Counter(
            "motet_placements_total",
            "Placements of requests on runners. A request that is placed again counts again.",
            registry=registry,
        )
        self.moves = Counter(
            "motet_moves_total",
            "Requests that the scheduler took from one runner and placed again, for example for a drain.",
            registry=registry,
        )
        self.refusals = Counter(
            "motet_refusals_total", "Requests that the scheduler refused, by error code.", ["code"], registry=registry
        )
        self.losses = Counter(
            "motet_lost_placements_total",
            "Placements that a gateway reported as lost: their runner died or could not be reached.",
            registry=registry,
        )
        self.declines = Counter(
            "motet_placement_declines_total",
            "Placements that a runner declined. motet_runner_declines_total of the runners says why.",
            registry=registry,
        )
        self.answers_ignored = Counter(
            "motet_ignored_adapter_answers_total",
            "Answers of runners to orders about adapters that had been replaced, or came from an earlier scheduler.",
            registry=registry,
        )
        self.failures = Counter(
            "motet_scheduler_failures_total",
            "Events that the scheduler failed to decide on because of a defect. Each time it starts again in a "
            "higher term.",
            registry=registry,
        )
        self.readmissions = Counter(
            "motet_resumes_allowed_total",
            "Parked requests that the scheduler allowed to resume, because pages were free for them again.",
            registry=registry,
        )
        self.decision_seconds = Histogram(
            "motet_scheduler_decision_seconds",
            "Seconds to decide what follows from one event.",
            buckets=[1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 2.5e-2, 0.1, 1.0],
            registry=registry,
        )
        self.queued = Gauge("motet_queued_requests", "Requests in the queue, by class.", ["class"], registry=registry)
        self.held = Gauge(
            "motet_quota_waiting_requests",
            "Requests that wait until the limits of their tenant, adapter or API key let them into the queue.",
            registry=registry,
        )
        self.known = Gauge("motet_known_requests", "Requests that wait, or are placed on a runner.", registry=registry)
        self.runners = Gauge(
            "motet_attached_runners", "Runners that are connected to the scheduler.", registry=registry
        )
        self.pages = Gauge(
            "motet_ledger_pages",
            "KV pages that each runner has now beside the adapters in use.",
            ["instance"],
            registry=registry,
        )
        self.promised = Gauge(
            "motet_ledger_promised_pages",
            "KV pages of each runner that are promised to requests.",
            ["instance"],
            registry=registry,
        )
        self.parked = Gauge(
            "motet_ledger_parked_requests",
            "Parked requests of each runner, as the scheduler knows them.",
            ["instance"],
            registry=registry,
        )
        self._of_runners = LevelsByInstance(self.pages, self.promised, self.parked)
        # Two labels, since a selector of Kubernetes cannot ask for a value with a slash in it.
        pool = ["pool_namespace", "pool"]
        self.desired = Gauge(
            "motet_pool_desired_replicas", "Runners that the scheduler advises a pool to have.", pool, registry=registry
        )
        self.serving = Gauge(
            "motet_pool_serving_runners", "Runners of a pool that take new requests.", pool, registry=registry
        )
        self.pool_running = Gauge(
            "motet_pool_running_requests", "Requests that are placed on a pool's runners.", pool, registry=registry
        )
        self.pool_waiting = Gauge(
            "motet_pool_waiting_requests",
            "Requests in the queue of a pool that another runner could serve. Pools that share a queue: all count for "
            "the first that may grow.",
            pool,
            registry=registry,
        )
        self.pool_held = Gauge(
            "motet_pool_held_requests",
            "Requests that gateways hold until a pool gets its first runner.",
            pool,
            registry=registry,
        )
        self.pool_used = Gauge(
            "motet_pool_kv_used_ratio",
            "Share of a pool's KV pages that are in use, 0 to 1.",
            pool,
            registry=registry,
        )
        self.pool_promised = Gauge(
            "motet_pool_kv_promised_ratio",
            "KV pages promised to requests, divided by the pool's KV pages. Above 1 the pool is overcommitted.",
            pool,
            registry=registry,
        )
        self._pools: Mapping[str, PoolFigures] | None = None
        self.term = Gauge(
            "motet_scheduler_term",
            "The term in which this scheduler leads. It grows each time another scheduler begins to lead.",
            registry=registry,
        )

    def observe(self, scheduler: Scheduler) -> None:
        """Take the levels, now and then."""
        self.known.set(len(scheduler.requests))
        self.held.set(scheduler.state.quotas.waiting)
        self.runners.set(sum(runner.attached for runner in scheduler.runners.values()))
        for one in RequestClass:
            waiting = sum(queue.size_of(one) for queue in scheduler.queues.values())
            self.queued.labels(one.name.lower()).set(waiting)
        self._observe_pools(scheduler.capacity.figures)
        self._of_runners.show(
            (runner.instance, (runner.ledger.capacity, runner.ledger.promised, len(runner.parked)))
            for runner in scheduler.runners.values()
        )

    def _observe_pools(self, pools: Mapping[str, PoolFigures]) -> None:
        if pools is self._pools:
            return  # nothing was computed since
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
            gauge.clear()  # removes the series of pools that no longer exist
            for name, figures in pools.items():
                namespace, _, pool = name.partition("/")
                gauge.labels(namespace, pool).set(value(figures))
