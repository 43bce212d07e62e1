"""Measures what 1,000 runners cost the scheduler and the supervisor, each with 32 requests and 32 adapters of 1,000.

`attach_s_1000` is the CPU time until all of them have attached, one after the other: the adapters are known, as after
a change of the leader. `report_share_1000` is the share of a core that their reports take, one a second from each;
between two reports of a runner a fifth of its requests end, others take their places, and the rest have more tokens.
Everything is counted from the bytes of a message to the policy's effects: no sockets. The supervisor's figures begin
with `supervisor_`.

    python -m benchmarks.many_runners [--runners 1000] [--rounds 5] [--json]
"""

import time
from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.harness import Result, arguments, report
from benchmarks.scheduler_catalog import ADAPTERS, CATALOG, digest_of, identity
from motet.api.v1 import common_pb2, scheduler_pb2, supervisor_pb2
from motet.domain import InstanceName
from motet.runner_info import Capacity
from motet_scheduler import conversion as scheduler_messages
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import SchedulerConfig
from motet_supervisor import conversion as supervisor_messages
from motet_supervisor.policy.supervisor import Supervisor
from motet_supervisor.policy.values import SupervisorConfig

REQUESTS, HELD = 32, 32
LIVES_OF = 5
"""A request is listed by this many reports."""
CAPACITY = Capacity(pages=1024, max_sequences=64, adapter_slots=HELD)
TARGET_ATTACH_S, TARGET_SHARE = 5.0, 0.2


def adapter_of(runner: int, place: int) -> str:
    return digest_of((runner * HELD + place) % ADAPTERS)


def live(runner: int, round_: int) -> Iterator[common_pb2.RunnerRequest]:
    for place in range(REQUESTS):
        life, age = divmod(round_ + place, LIVES_OF)
        yield common_pb2.RunnerRequest(
            request=f"request-{runner}-{place}-{life}",
            epoch=1,
            promise=common_pb2.Promise(pages=16, tokens=256),
            pages_used=8 + age,
            state=common_pb2.SEQUENCE_STATE_DECODE,
            prompt_tokens=100,
            output_tokens=16 * age,
            tenant=f"tenant-{place}",
            adapter_digest=adapter_of(runner, place),
            request_class=common_pb2.REQUEST_CLASS_STANDARD,
            gateway="gateway-0",
            max_tokens=128,
        )


def resident(runner: int) -> Iterator[common_pb2.ResidentAdapter]:
    for place in range(HELD):
        yield common_pb2.ResidentAdapter(
            digest=adapter_of(runner, place), tier=common_pb2.MEMORY_TIER_DEVICE, bytes=1 << 20
        )


class AtScheduler:
    def __init__(self) -> None:
        self._scheduler = Scheduler(SchedulerConfig(), now=0.0, saved=CATALOG)

    def hello(self, runner: int) -> bytes:
        hello = scheduler_pb2.RunnerHello(
            identity=identity(runner).to_proto(),
            address=f"10.0.0.{runner}:7101",
            capacity=CAPACITY.to_proto(),
            resident=resident(runner),
            live=live(runner, 0),
        )
        return scheduler_pb2.AttachUp(hello=hello).SerializeToString()

    def attach(self, message: bytes, now: float) -> None:
        up = scheduler_pb2.AttachUp.FromString(message)
        self._scheduler.handle(scheduler_messages.runner_attached(up.hello), now)

    def report(self, runner: int, round_: int) -> bytes:
        it = scheduler_pb2.Report(
            pages=CAPACITY.pages,
            pages_free=512,
            running=REQUESTS,
            steps=round_,
            resident=resident(runner),
            live=live(runner, round_),
        )
        return scheduler_pb2.AttachUp(report=it).SerializeToString()

    def hear(self, runner: int, message: bytes, now: float) -> None:
        up = scheduler_pb2.AttachUp.FromString(message)
        event = scheduler_messages.attach_event(identity(runner), up)
        assert event is not None
        self._scheduler.handle(event, now)


class AtSupervisor:
    def __init__(self) -> None:
        self._supervisor = Supervisor(SupervisorConfig())

    def hello(self, runner: int) -> bytes:
        hello = supervisor_pb2.WatchHello(
            identity=identity(runner).to_proto(), capacity=CAPACITY.to_proto(), live=live(runner, 0), heartbeats=True
        )
        return supervisor_pb2.WatchUp(hello=hello).SerializeToString()

    def attach(self, message: bytes, now: float) -> None:
        up = supervisor_pb2.WatchUp.FromString(message)
        self._supervisor.handle(supervisor_messages.runner_connected(up.hello), now)

    def report(self, runner: int, round_: int) -> bytes:
        memory = supervisor_pb2.MemoryReport(
            pages=CAPACITY.pages, steps=round_, work_pending=True, live=live(runner, round_)
        )
        return supervisor_pb2.WatchUp(memory=memory).SerializeToString()

    def hear(self, runner: int, message: bytes, now: float) -> None:
        up = supervisor_pb2.WatchUp.FromString(message)
        event = supervisor_messages.watch_event(InstanceName(identity(runner).instance), up)
        assert event is not None
        self._supervisor.handle(event, now)


def measure(service: AtScheduler | AtSupervisor, runners: int, rounds: int) -> tuple[float, Sequence[float]]:
    """CPU seconds until all have attached, and those of one report of each, for each round."""
    hellos = [service.hello(runner) for runner in range(runners)]
    began = time.thread_time()
    for runner, hello in enumerate(hellos):
        service.attach(hello, runner / runners)
    attach = time.thread_time() - began
    taken = []
    for round_ in range(1, rounds + 1):
        reports = [service.report(runner, round_) for runner in range(runners)]
        began = time.thread_time()
        for runner, message in enumerate(reports):
            service.hear(runner, message, round_ + runner / runners)
        taken.append(time.thread_time() - began)
    return attach, taken


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runners", type=int, default=1000, help="runners, each with 32 requests")
    parser.add_argument("--rounds", type=int, default=5, help="reports of each runner")
    given = parser.parse_args()
    attach, reports = measure(AtScheduler(), given.runners, given.rounds)
    watched, memory = measure(AtSupervisor(), given.runners, given.rounds)
    results = [
        Result(f"attach_s_{given.runners}", attach, "s", f"<= {TARGET_ATTACH_S:g} s", attach <= TARGET_ATTACH_S),
        Result(f"supervisor_attach_s_{given.runners}", watched, "s"),
        *(
            Result(f"{name}_{given.runners}", median(taken), "", f"<= {TARGET_SHARE:g}", median(taken) <= TARGET_SHARE)
            for name, taken in (("report_share", reports), ("supervisor_report_share", memory))
        ),
    ]
    report("many_runners", results, as_json=given.json)


if __name__ == "__main__":
    main()
