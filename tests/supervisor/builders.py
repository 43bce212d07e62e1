"""Events with good defaults, and a supervisor on a fake clock."""

from typing import Any

from motet.clock import FakeClock
from motet.domain import InstanceName, ParkMethod, RequestId
from motet.runner_info import Capacity, RunnerIdentity, RunnerRequest, SequenceState
from motet_supervisor.policy import effects, events
from motet_supervisor.policy.supervisor import Supervisor
from motet_supervisor.policy.values import SupervisorConfig

R0 = InstanceName("r0")


def entry(request: str, pages: int, *, used: int | None = None, parked: bool = False, **how: Any) -> RunnerRequest:
    """A request in the middle of its promise, unless `used` pages say otherwise."""
    used = max(1, pages // 2) if used is None else used
    fields = {
        "request": RequestId(request),
        "epoch": 1,
        "pages": pages,
        "pages_used": 0 if parked else used,
        "state": SequenceState.PARKED if parked else SequenceState.DECODE,
        "prompt_tokens": 8,
        "output_tokens": max(0, 16 * used - 8),
        "max_tokens": 1000,
    }
    return RunnerRequest(**(fields | how))


class SupervisorDriver:
    def __init__(self, **config: Any) -> None:
        self.clock = FakeClock()
        self.supervisor = Supervisor(SupervisorConfig(**config))
        self.effects: list[effects.Effect] = []
        self.pages: dict[str, int] = {}

    def send(self, event: events.Event) -> list[effects.Effect]:
        self.effects = self.supervisor.handle(event, self.clock())
        return self.effects

    def of(self, kind: type) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def connect(
        self,
        *live: RunnerRequest,
        instance: str = "r0",
        incarnation: str = "1",
        pages: int = 100,
        overcommit: float = 0.0,
        **capacity: Any,
    ) -> list[effects.Effect]:
        fields = {"pages": pages, "page_bytes": 1024, "host_bytes": 1 << 20, "max_model_length": 4096}
        self.pages[instance] = pages
        identity = RunnerIdentity(instance=instance, incarnation=incarnation, pool="default/demo")
        kept = Capacity(**(fields | capacity))
        return self.send(events.RunnerConnected(identity, kept, live, overcommit=overcommit))

    def report(self, *live: RunnerRequest, instance: str = "r0", **how: Any) -> list[effects.Effect]:
        fields: dict[str, Any] = {
            "instance": InstanceName(instance),
            "pages": 0,
            "host_bytes_free": 1 << 20,
            "steps": 0,
            "work_pending": False,
            "prefill_seconds_per_token": 0.0,
            "swap_seconds_per_page": 0.0,
            "live": live,
            "pages_free": self.pages.get(instance, 0) - sum(one.pages_used for one in live),
        }
        return self.send(events.MemoryReported(**(fields | how)))

    def overflow(self, one: RunnerRequest, instance: str = "r0") -> list[effects.Effect]:
        return self.send(events.OverflowAnnounced(InstanceName(instance), one))

    def parked(self, request: str, wanted: int) -> list[effects.Effect]:
        return self.send(events.RequestParked(R0, RequestId(request), 1, wanted, ParkMethod.RECOMPUTE))

    def resumed(self, request: str, pages: int) -> list[effects.Effect]:
        return self.send(events.RequestResumed(R0, RequestId(request), 1, pages))

    def resumable(self, request: str, pages: int, epoch: int = 1, term: int = 1) -> list[effects.Effect]:
        return self.send(events.Resumable(term, R0, RequestId(request), epoch, pages))

    def wait(self, seconds: float) -> list[effects.Effect]:
        self.clock.advance(seconds)
        return self.send(events.Tick())
