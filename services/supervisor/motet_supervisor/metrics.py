"""The supervisor's figures."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from motet_supervisor.policy.supervisor import Supervisor


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.overflows = Counter(
            "motet_supervisor_overflows_total", "Sequences that came within a page of their promise.", registry=registry
        )
        self.extensions = Counter(
            "motet_promise_extensions_total", "Promises that were made larger in place.", registry=registry
        )
        self.park_orders = Counter(
            "motet_park_orders_total", "Requests told to give way, by method.", ["method"], registry=registry
        )
        self.resume_orders = Counter(
            "motet_resume_orders_total", "Parked requests told to come back.", registry=registry
        )
        self.runners_lost = Counter(
            "motet_runners_unhealthy_total", "Runners taken for dead, by what was seen.", ["reason"], registry=registry
        )
        self.watched = Gauge("motet_watched_runners", "Runners whose stream is up.", registry=registry)
        self.free = Gauge(
            "motet_unpromised_pages", "Pages of a runner that are not promised.", ["instance"], registry=registry
        )
        self.parked = Gauge(
            "motet_parked_requests", "Requests that are parked on a runner.", ["instance"], registry=registry
        )

    def observe(self, supervisor: Supervisor) -> None:
        """Take the levels, now and then."""
        self.watched.set(sum(runner.connected for runner in supervisor.runners.values()))
        self.free.clear()
        self.parked.clear()
        for runner in supervisor.runners.values():
            self.free.labels(runner.instance).set(runner.free)
            self.parked.labels(runner.instance).set(sum(one.parked for one in runner.sequences.values()))
