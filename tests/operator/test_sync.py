"""The operator's stream, against a small scheduler over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from motet.api.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from motet.clock import Clock, FakeClock, monotonic
from motet.rpc import Outbox, run_stream
from motet.runner_info import KernelState
from motet.transport.over_grpc import GrpcServerStream, serving
from motet_operator.awaited_reports import AWAITED_SECONDS
from motet_operator.reconcile import CatalogSnapshot, RunnerDrain, ScalingAdvice, reconcile
from motet_operator.sync import SchedulerSync
from tests.common.waiting import PATIENCE_S
from tests.operator.builders import DIGEST, adapter, later, name, pool, view
from tests.support.surroundings import with_clock


class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    def __init__(self) -> None:
        self.received: list[scheduler_pb2.SyncUp] = []
        self.outbox: Outbox[scheduler_pb2.SyncDown] = Outbox()
        self._opened = False

    async def Sync(self, requests: AsyncIterator[scheduler_pb2.SyncUp], context: Any) -> None:  # type: ignore[override]
        if self._opened:  # what was put before the first stream opened is for that stream
            self.outbox = Outbox()
        self._opened = True
        await run_stream(GrpcServerStream(requests, context), self.outbox, self.received.append)

    @property
    def drains_revision(self) -> int:
        """Of the last set."""
        return max((message.drains.revision for message in self.received), default=0)

    def snapshots(self) -> list[list[str]]:
        """Names of adapters, snapshot by snapshot."""
        return [
            [entry.ref.name for entry in message.snapshot.adapters]
            for message in self.received
            if message.HasField("snapshot")
        ]


@asynccontextmanager
async def fake_scheduler(address: str) -> AsyncIterator[FakeScheduler]:
    scheduler = FakeScheduler()
    async with serving(address, lambda server: scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler, server)):
        yield scheduler


@dataclass
class FakeLeadership:
    term: int

    def raise_term_above(self, term: int, then: Callable[[], object]) -> None:
        self.term = max(self.term, term + 1)
        then()

    def step_down_for(self, term: int) -> None: ...


@asynccontextmanager
async def syncing(
    address: str, leadership: FakeLeadership | None = None, *, clock: Clock = monotonic
) -> AsyncIterator[SchedulerSync]:
    sync = SchedulerSync(address, lambda: None, leadership=lambda: leadership, surroundings=with_clock(clock))
    task = asyncio.create_task(sync.run())
    try:
        yield sync
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def catalog(*names: str) -> CatalogSnapshot:
    return reconcile(view(pools=[pool()], adapters=[adapter(each) for each in names])).catalog


async def test_the_catalog_goes_up_whole_whenever_it_changes_and_after_each_reconnection(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    async with syncing(address) as sync:
        async with fake_scheduler(address) as scheduler:
            await until(lambda: sync.connected)
            assert scheduler.snapshots() == [], "before the folder has been read there is nothing to say"
            sync.send_state(catalog("a"), [])
            sync.send_state(catalog("a"), [])
            await until(lambda: len(scheduler.snapshots()) == 1)
            sync.send_state(catalog("a", "b"), [])
            await until(lambda: len(scheduler.snapshots()) == 2)
            assert scheduler.snapshots() == [["a"], ["a", "b"]]
            entry = scheduler.received[-1].snapshot.adapters[0]
            assert (entry.group, entry.source, entry.content_stamp) == ("default/demo", "file:///adapters/a", "stamp")
            assert entry.max_class == common_pb2.REQUEST_CLASS_STANDARD
        await until(lambda: not sync.connected)
        sync.send_state(catalog("b"), [])
        async with fake_scheduler(address) as scheduler:
            await until(lambda: scheduler.snapshots() == [["b"]])


async def test_the_catalog_is_sent_with_tenants_shares_formats_and_demands(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    tenants = {"overrides": [{"namespace": "acme", "tokensPerMinute": 9, "weight": 3}]}
    place = view(
        pools=[
            pool(
                allowedNamespaces={"from": "All"},
                tenants=tenants,
                admission={"coldWaitSeconds": 7},
                chat={"toolFormat": "hermes", "requestTemplates": True},
            )
        ],
        adapters=[
            adapter("a", share=["acme"], chat={"toolFormat": "mistral", "reasoningFormat": "think"}),
            adapter("b", verify={"require": "Record", "onFailure": "Refuse"}),
            adapter("c", verify={"require": "None", "onFailure": "Warn"}),
        ],
    )
    async with fake_scheduler(address) as scheduler, syncing(address) as sync:
        sync.send_state(reconcile(place).catalog, [])
        await until(lambda: len(scheduler.snapshots()) == 1)
        snapshot = scheduler.received[-1].snapshot
        assert [(one.chat.tool, one.chat.request_templates) for one in snapshot.pools] == [("hermes", True)]
        assert [(one.chat.tool, one.chat.reasoning) for one in snapshot.adapters] == [
            ("mistral", "think"),
            ("", ""),
            ("", ""),
        ]
        assert [list(one.share) for one in snapshot.adapters] == [["acme"], [], []]
        demands = [(one.requires_record, one.refuses_mismatch) for one in snapshot.adapters]
        assert demands == [(False, False), (True, True), (False, False)]
        assert [list(one.tenants) for one in snapshot.pools] == [["*"]]
        standard = common_pb2.REQUEST_CLASS_STANDARD
        assert [dict(one.max_classes) for one in snapshot.pools] == [{"*": standard, "acme": standard}]
        assert [dict(one.limits) for one in snapshot.pools] == [{"acme": scheduler_pb2.Limits(tokens_per_minute=9)}]
        assert [dict(one.weights) for one in snapshot.pools] == [{"acme": 3}]
        assert [one.cold_wait_seconds for one in snapshot.pools] == [7]


async def test_an_invalid_certificate_is_left_out_and_the_rest_of_the_report_counts(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    async with fake_scheduler(address) as scheduler, syncing(address) as sync:
        await until(lambda: sync.connected)
        sync.send_state(catalog("a"), [])
        scheduler.outbox.put(
            scheduler_pb2.SyncDown(
                adapter=scheduler_pb2.AdapterReport(
                    ref=common_pb2.AdapterRef(namespace="default", name="a"),
                    serving_digest=DIGEST,
                    certificate=scheduler_pb2.Certificate(digest="no digest", rank=8),
                )
            )
        )
        await until(lambda: name("a") in sync.adapter_reports)
        assert (sync.adapter_reports[name("a")].serving_digest, sync.adapter_reports[name("a")].artifact) == (
            DIGEST,
            None,
        )


async def test_reports_are_kept_until_the_adapter_is_deleted(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    async with fake_scheduler(address) as scheduler, syncing(address) as sync:
        await until(lambda: sync.connected)
        sync.send_state(catalog("a"), [])
        await until(scheduler.snapshots)  # before that its stream may not be open
        scheduler.outbox.put(
            scheduler_pb2.SyncDown(
                adapter=scheduler_pb2.AdapterReport(
                    ref=common_pb2.AdapterRef(namespace="default", name="a", generation=3),
                    serving_digest=DIGEST,
                    certificate=scheduler_pb2.Certificate(
                        digest=DIGEST,
                        rank=8,
                        target_modules=["q_proj"],
                        base_digest=DIGEST,
                        warnings=["odd", "w" * 300],
                        proved_by=["torch", "k" * 100, *map(str, range(20))],
                        recorded_answers="Differ",
                    ),
                    failure=common_pb2.Failure(code="adapter_incompatible", message="no", reason="RankTooLarge"),
                    serving_source="hf://org/a",
                    serving_revision="v2",
                    checking=True,
                    replicas=[
                        scheduler_pb2.AdapterReplica(instance="r1", tier=common_pb2.MEMORY_TIER_HOST, digest=DIGEST),
                        scheduler_pb2.AdapterReplica(instance="r0", tier=common_pb2.MEMORY_TIER_DEVICE, digest=DIGEST),
                    ],
                )
            )
        )
        await until(lambda: name("a") in sync.adapter_reports)
        known = sync.adapter_reports[name("a")]
        assert (known.serving_digest, known.generation, known.failure_reason) == (DIGEST, 3, "RankTooLarge")
        assert not known.failure_passes
        assert (known.source, known.source_revision, known.checking) == ("hf://org/a", "v2", True)
        assert known.artifact is not None
        assert (known.artifact.rank, known.artifact.target_modules) == (8, ("q_proj",))
        assert known.artifact.base_digest == DIGEST
        assert known.artifact.warnings == ("odd", "w" * 253)
        assert known.artifact.proved_by == ("torch", "k" * 64, "0", "1", "2", "3", "4", "5")
        assert known.artifact.recorded_answers == "Differ"
        assert [(place.runner, place.tier) for place in known.replicas] == [("r0", "device"), ("r1", "host")]
        sync.send_state(catalog(), [])
        assert sync.adapter_reports == {}


def drains_of(scheduler: FakeScheduler) -> list[list[tuple[str, str]]]:
    """Instance and incarnation, set by set."""
    return [
        [(one.runner.instance, one.runner.incarnation) for one in message.drains.runners]
        for message in scheduler.received
        if message.HasField("drains")
    ]


async def test_the_set_of_drains_is_sent_first_on_change_and_on_connection(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    drain = RunnerDrain(instance="r0", pool=name("demo"), revision="abc", deadline=later(10**9))
    async with syncing(address) as sync:
        async with fake_scheduler(address) as scheduler:
            await until(lambda: sync.connected)
            sync.send_state(catalog(), [drain])
            sync.send_state(catalog(), [drain])
            await until(scheduler.snapshots)
            sync.send_state(catalog("a"), [drain])
            await until(lambda: len(scheduler.snapshots()) == 2)
            assert drains_of(scheduler) == [[("r0", "")]]
            assert scheduler.received[0].HasField("drains"), "who drains is known before anything is placed"
            assert scheduler.received[0].drains.runners[0].runner.pool == "default/demo"
            scheduler.outbox.put(
                scheduler_pb2.SyncDown(
                    drained=scheduler_pb2.Drained(
                        runner=common_pb2.RunnerIdentity(instance="r0"), drains_revision=scheduler.drains_revision
                    )
                )
            )
            await until(lambda: sync.drained == {"r0"})
        async with fake_scheduler(address) as scheduler:
            await until(lambda: len(scheduler.received) == 2)
            assert scheduler.received[0].HasField("drains")
            assert drains_of(scheduler) == [[("r0", "")]]
            sync.send_state(catalog("a"), [])
            assert sync.drained == set()
            await until(lambda: drains_of(scheduler) == [[("r0", "")], []])


async def test_the_operator_knows_of_which_groups_the_scheduler_has_reported_all(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    async with fake_scheduler(address) as scheduler, syncing(address) as sync:
        await until(lambda: sync.connected)
        assert sync.reported_groups == frozenset()
        for group in ("default/demo", "default/other"):
            scheduler.outbox.put(scheduler_pb2.SyncDown(reported_all=scheduler_pb2.ReportedAll(groups=[group])))
        await until(lambda: sync.reported_groups == {name("demo"), name("other")})
        sync.send_state(catalog(), [])
        assert sync.reported_groups == {name("demo")}, "of one that comes back it is said again"


async def test_the_operator_waits_only_for_a_while_for_a_scheduler_that_does_not_say_what_it_has_reported(
    tmp_path: Path,
) -> None:
    address, clock = f"unix:{tmp_path}/s.sock", FakeClock()
    async with fake_scheduler(address) as scheduler, syncing(address, clock=clock) as sync:
        await until(lambda: sync.connected)
        clock.advance(2 * AWAITED_SECONDS)
        assert sync.reported_groups == frozenset(), "nobody has spoken yet, as on a stream to a standby"
        assert not sync.advice_is_awaited
        scheduler.outbox.put(scheduler_pb2.SyncDown(welcome=common_pb2.Welcome(term=1)))
        scheduler.outbox.put(scheduler_pb2.SyncDown(desired=scheduler_pb2.DesiredCapacity(pool="default/demo")))
        await until(lambda: sync.advice)
        assert sync.reported_groups == frozenset()
        clock.advance(AWAITED_SECONDS)
        assert sync.reported_groups is None


async def test_an_operator_without_drains_sends_an_empty_set(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    async with fake_scheduler(address) as scheduler, syncing(address) as sync:
        await until(lambda: sync.connected)
        assert not scheduler.received, "before the first round nobody knows who drains"
        sync.send_state(catalog(), [])
        await until(lambda: drains_of(scheduler) == [[]])


async def test_a_drained_report_counts_only_for_the_process_that_drains_now(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    drain = RunnerDrain(instance="r0", pool=name("demo"), revision="abc", deadline=later(10**9))

    def identity(incarnation: str) -> common_pb2.RunnerIdentity:
        return common_pb2.RunnerIdentity(instance="r0", incarnation=incarnation)

    def drained(incarnation: str) -> scheduler_pb2.SyncDown:
        word = scheduler_pb2.Drained(runner=identity(incarnation), drains_revision=scheduler.drains_revision)
        return scheduler_pb2.SyncDown(drained=word)

    def here(incarnation: str) -> scheduler_pb2.SyncDown:
        return scheduler_pb2.SyncDown(runner=scheduler_pb2.RunnerReport(runner=identity(incarnation), attached=True))

    async with fake_scheduler(address) as scheduler, syncing(address) as sync:
        await until(lambda: sync.connected)
        sync.send_state(catalog(), [drain], ["r0"])
        await until(lambda: scheduler.received)
        scheduler.outbox.put(here("1"))
        scheduler.outbox.put(drained("1"))
        await until(lambda: sync.drained == {"r0"})
        scheduler.outbox.put(here("2"))
        await until(lambda: not sync.drained)
        await until(lambda: drains_of(scheduler) == [[("r0", "")], [("r0", "1")], [("r0", "2")]])
        scheduler.outbox.put(drained("1"))
        scheduler.outbox.put(drained("2"))
        await until(lambda: sync.drained)
        sync.send_state(catalog(), [], ["r0"])
        scheduler.outbox.put(drained("2"))  # on its way while the drain was taken back
        scheduler.outbox.put(here("3"))
        await until(lambda: sync.identities["r0"].incarnation == "3")
        sync.send_state(catalog(), [drain], ["r0"])
        assert sync.drained == set()


async def test_a_runner_is_unhealthy_until_it_recovers_or_a_successor_connects(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    async with syncing(address) as sync, fake_scheduler(address) as scheduler:
        await until(lambda: sync.connected)

        def say(incarnation: str, why: str = "", *, attached: bool = True) -> None:
            identity = common_pb2.RunnerIdentity(instance="r0", incarnation=incarnation)
            room = common_pb2.Capacity(adapter_slots=4 if incarnation == "fourth" else 1)
            report = scheduler_pb2.RunnerReport(runner=identity, attached=attached, unhealthy=why, capacity=room)
            scheduler.outbox.put(scheduler_pb2.SyncDown(runner=report))

        say("first", "it hangs")
        await until(lambda: "r0" in sync.unhealthy)
        since = sync.unhealthy["r0"].since
        say("first", "it hangs")
        say("second", "it is silent")
        await until(lambda: sync.unhealthy["r0"].incarnation == "second")
        assert sync.unhealthy["r0"].since > since, "each incarnation has its own chance"
        say("second")
        await until(lambda: not sync.unhealthy)
        say("second", "it is silent")
        await until(lambda: sync.unhealthy)
        say("second", "it is silent", attached=False)  # given up at last; it still hangs
        say("third", attached=True)
        await until(lambda: not sync.unhealthy)
        say("third", "its streams are down", attached=False)  # died, as far as can be seen
        say("fourth")
        await until(lambda: sync.slots.get("r0") == 4)
        assert not sync.unhealthy


async def test_a_cap_is_news_if_its_number_changes_or_the_time_of_one_alone_did(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    async with syncing(address) as sync, fake_scheduler(address) as scheduler:
        await until(lambda: sync.connected)
        identity = common_pb2.RunnerIdentity(instance="r0", incarnation="1")
        for number, (sequences, alone, news) in enumerate(
            (
                (5, 0.01, True),
                (5, 0.015, False),
                (6, 0.015, True),
                (1, 0.03, True),
                (1, 0.031, False),
                (1, 0.04, True),
                (1, 0.0201, True),
                (1, 0.0199, False),
                (1, 0.0202, False),
                (1, 0.018, True),
            )
        ):
            capacity = common_pb2.Capacity(adapter_slots=number)  # which shows that the report has come
            cap = common_pb2.BatchCap(target_seconds=0.02, sequences=sequences, alone_seconds=alone)
            report = scheduler_pb2.RunnerReport(runner=identity, attached=True, capacity=capacity, batch_cap=cap)
            scheduler.outbox.put(scheduler_pb2.SyncDown(runner=report))
            await until(lambda number=number: sync.slots.get("r0") == number)
            known = sync.batch_caps["r0"]
            assert (known.sequences, known.alone_seconds == alone) == (sequences, news)


async def test_the_number_of_requests_of_a_runner_is_known_until_it_is_gone(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    async with syncing(address) as sync, fake_scheduler(address) as scheduler:
        await until(lambda: sync.connected)
        for running, waiting in ((3, 2), (0, 1)):
            report = scheduler_pb2.RunnerReport(
                runner=common_pb2.RunnerIdentity(instance="r0"), attached=True, running=running, waiting=waiting
            )
            scheduler.outbox.put(scheduler_pb2.SyncDown(runner=report))
            await until(lambda both=running + waiting: sync.requests == {"r0": both})
        sync.send_state(catalog(), [], ["r0"])
        sync.send_state(catalog(), [], [])
        assert sync.requests == {}


async def test_the_kernels_of_a_runner_are_known_until_it_is_gone(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    async with syncing(address) as sync, fake_scheduler(address) as scheduler:
        await until(lambda: sync.connected)

        def say(*, kernels: common_pb2.KernelState | None = None, attached: bool = True) -> None:
            identity = common_pb2.RunnerIdentity(instance="r0", incarnation="first")
            report = scheduler_pb2.RunnerReport(runner=identity, attached=attached, kernels=kernels)
            scheduler.outbox.put(scheduler_pb2.SyncDown(runner=report))

        say(kernels=common_pb2.KernelState(serving="torch", since_unix_seconds=5, note="they come"))
        await until(lambda: sync.kernels == {"r0": KernelState("torch", 5.0, "they come")})
        say()  # by a scheduler that does not know them yet
        say(kernels=common_pb2.KernelState(serving="cpp (avx2)", since_unix_seconds=6))
        await until(lambda: sync.kernels == {"r0": KernelState("cpp (avx2)", 6.0)})
        sync.send_state(catalog(), [], ["r0"])
        sync.send_state(catalog(), [], [])
        assert sync.kernels == {}


async def test_the_knowledge_about_a_runner_is_removed_with_it(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    async with syncing(address) as sync, fake_scheduler(address) as scheduler:
        await until(lambda: sync.connected)

        def say(instance: str, *, attached: bool = True) -> None:
            identity = common_pb2.RunnerIdentity(instance=instance, incarnation="first")
            report = scheduler_pb2.RunnerReport(
                runner=identity, attached=attached, unhealthy="it hangs", capacity=common_pb2.Capacity(adapter_slots=4)
            )
            scheduler.outbox.put(scheduler_pb2.SyncDown(runner=report))

        for instance in ("goes", "stays", "not seen yet"):
            say(instance)
        await until(lambda: len(sync.slots) == 3)
        sync.send_state(catalog(), [], instances=["goes", "stays"])
        assert len(sync.slots) == len(sync.unhealthy) == 3, "a watch may be behind the scheduler"
        sync.send_state(catalog(), [], instances=["stays"])
        assert set(sync.slots) == set(sync.unhealthy) == {"stays", "not seen yet"}
        say("goes", attached=False)
        say("stays", attached=False)
        say("last")
        await until(lambda: "last" in sync.slots)
        assert set(sync.slots) == set(sync.unhealthy) == {"stays", "not seen yet", "last"}


async def test_advice_is_remembered_with_its_reason_and_goes_stale_with_the_stream(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    demo = name("demo")
    async with syncing(address) as sync:
        async with fake_scheduler(address) as scheduler:
            await until(lambda: sync.connected)
            sync.send_state(
                reconcile(
                    view(pools=[pool(autoscaling={"mode": "Builtin", "minReplicas": 0, "maxReplicas": 3})])
                ).catalog,
                [],
            )
            await until(lambda: any(message.snapshot.pools for message in scheduler.received))
            entry = scheduler.received[-1].snapshot.pools[0]
            assert (entry.scaling, entry.min_replicas, entry.max_replicas) == (scheduler_pb2.SCALING_MODE_BUILTIN, 0, 3)
            assert entry.scale_down_stabilization_seconds == 300
            desired = scheduler_pb2.DesiredCapacity(pool="default/demo", replicas=2, reason="much", reason_code="Much")
            scheduler.outbox.put(scheduler_pb2.SyncDown(desired=desired))
            await until(lambda: demo in sync.advice)
            assert sync.advice[demo] == ScalingAdvice(replicas=2, code="Much", reason="much")
        await until(lambda: not sync.connected)
        assert sync.advice[demo] == ScalingAdvice(
            replicas=2, code="Much", reason="the scheduler is not connected", stale=True
        )
    sync.send_state(CatalogSnapshot(), [])
    assert not sync.advice


async def test_a_state_rejected_for_its_term_is_sent_again_in_a_later_one(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    drain = RunnerDrain(instance="r0", pool=name("demo"), revision="abc", deadline=later(10**9))
    async with fake_scheduler(address) as scheduler, syncing(address, FakeLeadership(3)) as sync:
        await until(lambda: sync.connected)
        sync.send_state(catalog("a"), [drain])
        await until(lambda: len(scheduler.received) == 2)
        assert {message.term for message in scheduler.received} == {3}
        scheduler.outbox.put(scheduler_pb2.SyncDown(outranked=scheduler_pb2.Outranked(term=41)))
        scheduler.outbox.put(scheduler_pb2.SyncDown(outranked=scheduler_pb2.Outranked(term=41)))
        await until(lambda: len(scheduler.received) == 4)
        sync.send_state(catalog("b"), [drain])
        await until(lambda: scheduler.snapshots()[-1] == ["b"])
        assert [message.term for message in scheduler.received[2:]] == [42] * 3
        assert scheduler.snapshots() == [["a"], ["a"], ["b"]]


async def test_an_operator_does_not_follow_a_term_that_would_be_the_last(tmp_path: Path) -> None:
    address, leadership = f"unix:{tmp_path}/s.sock", FakeLeadership(3)
    async with fake_scheduler(address) as scheduler, syncing(address, leadership) as sync:
        await until(lambda: sync.connected)
        sync.send_state(catalog("a"), [])
        await until(scheduler.snapshots)
        scheduler.outbox.put(scheduler_pb2.SyncDown(outranked=scheduler_pb2.Outranked(term=2**64 - 1)))
        await until(lambda: len(scheduler.snapshots()) == 2)  # over a new connection
        assert leadership.term == 3
        assert {message.term for message in scheduler.received} == {3}


async def test_a_drained_report_of_a_cancelled_drain_does_not_count_for_the_next_one(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    drain = RunnerDrain(instance="r0", pool=name("demo"), revision="abc", deadline=later(10**9))
    async with fake_scheduler(address) as scheduler, syncing(address) as sync:
        await until(lambda: sync.connected)

        def say(revision: int) -> None:
            word = scheduler_pb2.Drained(runner=common_pb2.RunnerIdentity(instance="r0"), drains_revision=revision)
            scheduler.outbox.put(scheduler_pb2.SyncDown(drained=word))

        sync.send_state(catalog(), [drain])
        await until(lambda: scheduler.received)
        first = scheduler.drains_revision
        for drains in ([], [drain]):  # before the word about the first one has come
            sync.send_state(catalog(), drains)
        say(first)
        await until(lambda: scheduler.drains_revision > first + 1)
        report = scheduler_pb2.RunnerReport(runner=common_pb2.RunnerIdentity(instance="r1"), attached=True)
        scheduler.outbox.put(scheduler_pb2.SyncDown(runner=report))
        await until(lambda: sync.attached == {"r1"})  # so the word before it was read
        assert sync.drained == set()
        say(scheduler.drains_revision)
        await until(lambda: sync.drained == {"r0"})


async def test_attached_runners_are_known_until_they_leave(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    async with syncing(address) as sync, fake_scheduler(address) as scheduler:
        await until(lambda: sync.connected)
        sync.send_state(catalog(), [], ["r0", "r1"])

        def say(instance: str, *, attached: bool) -> None:
            identity = common_pb2.RunnerIdentity(instance=instance, incarnation="1")
            report = scheduler_pb2.RunnerReport(runner=identity, attached=attached)
            scheduler.outbox.put(scheduler_pb2.SyncDown(runner=report))

        say("r0", attached=True)
        say("r1", attached=True)
        await until(lambda: sync.attached == {"r0", "r1"})
        say("r0", attached=False)
        await until(lambda: sync.attached == {"r1"})
        sync.send_state(catalog(), [], ["r0"])
        assert sync.attached == set()


async def test_the_catalog_is_sent_with_the_uids_of_namespaces_whenever_they_change(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    async with fake_scheduler(address) as scheduler, syncing(address) as sync:
        await until(lambda: sync.connected)
        for count, uid in enumerate(("first", "second"), start=1):
            place = replace(view(pools=[pool()]), namespace_uids={"zeta": "z", "acme": uid})
            sync.send_state(reconcile(place).catalog, [])
            await until(lambda count=count: len(scheduler.snapshots()) == count)
        stated = [message.snapshot for message in scheduler.received if message.HasField("snapshot")]
        said = [[(one.name, one.uid) for one in snapshot.namespaces] for snapshot in stated]
        assert said == [[("acme", "first"), ("zeta", "z")], [("acme", "second"), ("zeta", "z")]]
