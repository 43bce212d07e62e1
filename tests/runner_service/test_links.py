"""The runner's streams to scheduler and supervisor: hellos, reports, orders, terms and self-protection."""

import asyncio
import functools
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from motet.api.v1 import common_pb2, scheduler_pb2, supervisor_pb2
from motet.digest import adapter_digest
from motet.domain import BASE, RequestId
from motet.errors import AdapterUnproved
from motet.health import Health
from motet.prefix_hints import MAX_CACHED_HINTS
from motet.promises import PromiseRule
from motet.runner_info import KernelState
from motet_runner import scheduler_link
from motet_runner.adapters import residency
from motet_runner.adapters.cache import CERTIFICATE
from motet_runner.adapters.proof import Proof
from motet_runner.interface import EngineSequenceReport, OverflowAhead, ProofEnded, State
from motet_runner.plan.host_adapters import BLOCK_BYTES
from motet_simulator.fake_engine import FakeEngine, SlowEngines, tokens_of
from tests.runner_service.fake_peers import gateway_to, scheduler_at, supervisor_at, until
from tests.support.in_process_runner import in_process_runner, write_adapter
from tests.support.metric_values import value_of

SLOW = functools.partial(FakeEngine, step_seconds=0.02)
"""With such steps, an answer of 2000 tokens lasts until the test ends it."""

DEVICE = common_pb2.ADAPTER_STAGE_DEVICE


def places(folder):
    return f"unix:{folder}/s.sock", f"unix:{folder}/v.sock"


@asynccontextmanager
async def hanging_engine(folder, **how):
    """A supervisor and a gateway of a runner whose engine takes no step before it may go on."""
    _, address = places(folder)
    may_go_on = threading.Event()

    class Hanging(FakeEngine):
        def step(self):
            may_go_on.wait()
            return super().step()

    async with (
        supervisor_at(address) as supervisor,
        in_process_runner(folder, supervisor=address, engine=Hanging, **how) as runner,
        gateway_to(runner.address) as gateway,
    ):
        try:
            yield supervisor, gateway, may_go_on
        finally:
            may_go_on.set()


async def test_the_hello_has_identity_capacity_and_address(folder):
    address, _ = places(folder)
    async with scheduler_at(address) as scheduler, in_process_runner(folder, scheduler=address) as runner:
        (hello,) = await until(lambda: scheduler.of("hello"))
        assert hello.identity.instance == "r0"
        assert hello.identity.group == "default/demo"
        assert len(hello.identity.incarnation) == 16
        assert hello.address == runner.address
        assert hello.capacity.pages == 256
        assert hello.base.digest.startswith("sha256:")
        assert hello.base.asset_digest.startswith("sha256:")
        assert hello.base.digest != hello.base.asset_digest


async def test_the_hello_says_what_the_preset_promises(folder):
    address, _ = places(folder)
    async with scheduler_at(address) as scheduler, in_process_runner(folder, scheduler=address, preset="ft-max"):
        (hello,) = await until(lambda: scheduler.of("hello"))
        assert hello.capacity.promise_rule == PromiseRule.CONTEXT


async def test_a_new_scheduler_is_sent_live_requests_and_the_highest_term(folder):
    address, _ = places(folder)
    async with (
        in_process_runner(folder, scheduler=address, engine=SLOW) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await gateway.submit("a", max_tokens=2000, term=7)
        await until(lambda: gateway.tokens.get(("a", 1)))
        runner.service.accepted.accepts_term(7)
        for _ in range(2):
            async with scheduler_at(address) as scheduler:
                (hello,) = await until(lambda s=scheduler: s.of("hello"))
                assert hello.highest_term == 7
                (live,) = hello.live
                assert (live.request, live.epoch, live.gateway, live.tenant) == ("a", 1, "g0", "default")
                assert live.request_class == common_pb2.REQUEST_CLASS_INTERACTIVE
                assert live.promise.pages == 126


async def test_reports_have_all_requests(folder):
    address, _ = places(folder)
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=SLOW) as runner,
        gateway_to(runner.address) as gateway,
    ):
        for n in range(3):
            await gateway.submit(f"r{n}", max_tokens=1000)
        report = await until(
            lambda: next((r for r in scheduler.of("report") if sum(x.pages_used > 0 for x in r.live) == 3), None)
        )
        assert {x.state for x in report.live} == {common_pb2.SEQUENCE_STATE_DECODE}
        assert report.pages_promised == sum(x.charged_pages for x in report.live)
        for n in range(3):
            await gateway.cancel(f"r{n}")
            await gateway.finished(f"r{n}")
        seen = len(scheduler.of("report"))
        await until(lambda: len(scheduler.of("report")) > seen + 1)
        last = scheduler.of("report")[-1]
        assert not last.live
        assert last.pages_promised == 0
        assert last.pages_free == 256
        numbers = [r.sequence for r in scheduler.of("report")]
        assert numbers == sorted(set(numbers))


async def test_the_scheduler_is_told_at_once_which_sequences_have_ended(folder):
    """Not only when their gateways have read all tokens."""
    address, _ = places(folder)
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await gateway.submit("a", max_tokens=3)
        await gateway.submit("b", max_tokens=2, epoch=4)
        ended = await until(
            lambda: (
                found if len(found := [one for them in scheduler.of("ended") for one in them.sequences]) > 1 else None
            )
        )
        assert sorted((one.request, one.epoch) for one in ended) == [("a", 1), ("b", 4)]


class ChargingEngine(FakeEngine):
    """It charges `charged_pages` pages to each sequence, and its cache has these hints."""

    charged_pages = None
    cached_prefixes = ()

    def report(self):
        report = super().report()
        return replace(
            report,
            sequences=[entry._replace(charged_pages=self.charged_pages) for entry in report.sequences],
            cached_prefixes=self.cached_prefixes,
        )


class SharingEngine(ChargingEngine):
    """Other sequences pay for all pages, and the cache is very full."""

    charged_pages = 0
    cached_prefixes = tuple(range(2 * MAX_CACHED_HINTS))


class ChangingEngine(FakeEngine):
    """It begins with some kernels, and reports others later."""

    def __post_init__(self):
        super().__post_init__()
        self.info = replace(self.info, kernels=KernelState("torch", 1.0, "others come"))

    def report(self):
        return replace(super().report(), kernels=KernelState("cpp (avx2)", 2.0))


async def test_hello_and_reports_say_which_kernels_serve(folder):
    address, _ = places(folder)
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=ChangingEngine) as runner,
    ):
        (hello,) = await until(lambda: scheduler.of("hello"))
        assert hello.kernels.serving in {"torch", "cpp (avx2)"}
        report = await until(lambda: next(iter(scheduler.of("report")), None))
        assert KernelState.from_proto(report.kernels) == KernelState("cpp (avx2)", 2.0)
        (sample,) = [one for family in runner.service.metrics.kernels.collect() for one in family.samples]
        assert (sample.labels, sample.value) == ({"serving": "cpp (avx2)"}, 2.0)


async def test_reports_have_the_charged_pages_and_the_most_valuable_cached_prefixes(folder):
    address, _ = places(folder)
    engine = functools.partial(SharingEngine, step_seconds=0.02)
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=engine) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await gateway.submit("a", max_tokens=1000)
        report = await until(
            lambda: next((r for r in scheduler.of("report") if any(x.pages_used for x in r.live)), None)
        )
        assert [(x.promise.pages, x.charged_pages) for x in report.live] == [(63, 1)], "0 would mean the whole promise"
        assert tuple(report.cached_prefixes) == SharingEngine.cached_prefixes[:MAX_CACHED_HINTS]


async def test_an_engine_without_a_prefix_cache_reports_neither(folder):
    address, _ = places(folder)
    engine = functools.partial(ChargingEngine, step_seconds=0.02)
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=engine) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await gateway.submit("a", max_tokens=1000)
        report = await until(
            lambda: next((r for r in scheduler.of("report") if any(x.pages_used for x in r.live)), None)
        )
        assert [x.charged_pages for x in report.live] == [0]
        assert not report.cached_prefixes


async def test_a_hanging_engine_is_reported_as_hung(folder):
    async with hanging_engine(folder) as (supervisor, gateway, _):
        await until(lambda: supervisor.of("memory"))
        await gateway.submit("a")
        stuck = await until(lambda: [m for m in supervisor.of("memory") if m.work_pending])
        seen = len(supervisor.of("memory"))
        await until(lambda: len(supervisor.of("memory")) > seen + 3)
        assert supervisor.of("memory")[-1].steps == stuck[0].steps


async def test_an_engine_does_not_hang_while_a_request_waits_for_its_adapters_files(folder):
    _, address = places(folder)
    health = Health()
    async with (
        supervisor_at(address) as supervisor,
        in_process_runner(
            folder, supervisor=address, health=health, hang_seconds=0.1, adapter_wait_seconds=1000
        ) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await gateway.submit("cold", adapter=f"sha256:{'0' * 64}")
        await until(lambda: any(one.live for one in supervisor.of("memory")))
        seen = len(supervisor.of("memory"))
        await until(lambda: len(supervisor.of("memory")) > seen + 10)  # five times as long as an engine may hang
        assert runner.service.accepted.holds("cold", 1)
        assert not any(one.work_pending for one in supervisor.of("memory"))
        assert health.dead_reason() == ""


async def test_reports_to_the_supervisor_say_whether_a_scheduler_has_welcomed_the_runner(folder):
    schedulers, address = places(folder)
    async with (
        supervisor_at(address) as supervisor,
        in_process_runner(folder, scheduler=schedulers, supervisor=address) as runner,
    ):

        async def says(has_scheduler):
            await until(lambda: [one.has_scheduler for one in supervisor.of("memory")][-1:] == [has_scheduler])

        await says(False)
        assert supervisor.of("memory")[0].HasField("has_scheduler")
        async with scheduler_at(schedulers):
            await says(True)
        await says(False)
        runner.service.accepted.accepts_term(7)
        async with scheduler_at(schedulers) as one_that_led:
            seen = len(supervisor.of("memory"))
            await until(lambda: one_that_led.of("hello") and len(supervisor.of("memory")) > seen + 3)
            assert not supervisor.of("memory")[-1].has_scheduler


async def test_heartbeats_wait_neither_for_an_iteration_nor_for_the_next_report(folder):
    """A report that is asked for during an iteration comes when that ends, or with the next one's turn."""
    async with hanging_engine(folder, report_seconds=1000) as (supervisor, gateway, _):
        await until(lambda: supervisor.received)
        assert supervisor.of("hello")[0].heartbeats
        await gateway.submit("a")
        seen, reports = len(supervisor.of("heartbeat")), len(supervisor.of("memory"))
        await until(lambda: len(supervisor.of("heartbeat")) > seen + 5)
        assert len(supervisor.of("memory")) <= reports + 1


async def test_a_report_of_a_busy_engine_is_sent_again_with_its_number(folder):
    async with hanging_engine(folder) as (supervisor, gateway, may_go_on):
        await until(lambda: len(supervisor.of("memory")) > 2)
        await gateway.submit("a")
        seen = len(supervisor.of("memory"))
        await until(lambda: len(supervisor.of("memory")) > seen + 5)
        numbers = [one.sequence for one in supervisor.of("memory")]
        assert numbers[-3:] == [numbers[-1]] * 3
        assert numbers[1] == numbers[0] + 1
        may_go_on.set()
        await until(lambda: supervisor.of("memory")[-1].sequence > numbers[-1])


async def test_the_hello_says_which_overcommit_it_was_told_last(folder):
    """A supervisor that was started again has not learned it yet."""
    _, address = places(folder)
    engines = []

    def engine():
        engines.append(FakeEngine())
        return engines[-1]

    async with in_process_runner(folder, supervisor=address, engine=engine):
        async with supervisor_at(address) as before:
            (hello,) = await until(lambda: before.of("hello"))
            assert hello.overcommit == 0
            told = supervisor_pb2.Overcommit(pool="default/demo", factor=1.25)
            before.send(supervisor_pb2.WatchDown(overcommit=told))
            await until(lambda: engines and engines[0].ledger.overcommit == 1.25)
        async with supervisor_at(address) as after:
            (hello,) = await until(lambda: after.of("hello"))
            assert hello.overcommit == 1.25


async def test_an_adapter_is_certified_then_served(folder):
    address, _ = places(folder)
    source = write_adapter(folder / "a0").as_uri()
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await until(lambda: scheduler.of("hello"))
        scheduler.ensure("a0", source)
        state = await scheduler.adapter("a0", stage=common_pb2.ADAPTER_STAGE_CERTIFIED)
        assert state.certificate.rank == 4
        assert state.certificate.mapped == 2
        assert state.certificate.digest == state.digest
        cached = folder / "data/cache/adapters" / state.digest.removeprefix("sha256:")
        assert {path.name for path in cached.iterdir() if not path.name.startswith(".origin-")} == {
            "adapter_config.json",
            "adapter_model.safetensors",
            CERTIFICATE,
            runner.service.loaded.adapters.get(state.digest).checked.layout.linears_file,
        }
        assert {path.stat().st_mode & 0o777 for path in cached.iterdir()} == {0o644}
        await gateway.submit("x", adapter=state.digest)
        await gateway.finished("x")
        assert gateway.tokens["x", 1] == tokens_of((1, 2, 3), 7, 8, state.digest)
        on_device = await scheduler.adapter("a0", stage=DEVICE)
        assert on_device.digest == state.digest
        report = await until(lambda: next((r for r in scheduler.of("report") if r.resident), None))
        assert report.resident[0].digest == state.digest


@pytest.mark.parametrize(
    ("settings", "slabs"),
    [({}, True), ({"disk_limit": "10Gi"}, False), ({"disk_limit": "10Gi", "adapter_disk_mib": 9}, True)],
)
async def test_where_a_limit_of_kubernetes_does_not_show_slabs_need_a_bound(folder, settings, slabs):
    address, _ = places(folder)
    source = write_adapter(folder / "a0").as_uri()

    def engine() -> FakeEngine:
        fake = FakeEngine()
        fake.info = replace(fake.info, run_layout="one")
        return fake

    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=engine, **settings) as runner,
    ):
        await until(lambda: scheduler.of("hello"))
        scheduler.ensure("a0", source)
        state = await scheduler.adapter("a0", stage=common_pb2.ADAPTER_STAGE_CERTIFIED)
        assert bool(runner.service.loaded.adapters.get(state.digest).checked.layout.slab) is slabs


async def test_a_scheduler_that_takes_changes_is_told_only_what_has_changed(folder):
    address, _ = places(folder)
    sources = [write_adapter(folder / f"a{n}", seed=n).as_uri() for n in range(3)]
    async with scheduler_at(address) as scheduler:
        scheduler.takes_residency = True
        async with in_process_runner(folder, scheduler=address) as runner, gateway_to(runner.address) as gateway:
            await until(lambda: scheduler.of("hello"))
            for n, source in enumerate(sources):
                scheduler.ensure(f"a{n}", source)
            digests = [(await scheduler.adapter(f"a{n}")).digest for n in range(3)]
            disk, device = common_pb2.MEMORY_TIER_DISK, common_pb2.MEMORY_TIER_DEVICE
            await until(lambda: held(scheduler) == dict.fromkeys(digests, disk))
            await gateway.submit("x", adapter=digests[0])
            await gateway.finished("x")
            await until(lambda: held(scheduler) == dict.fromkeys(digests, disk) | {digests[0]: device})
            scheduler.send(scheduler_pb2.AttachDown(drop=scheduler_pb2.DropAdapter(term=1, digest=digests[1])))
            await until(lambda: held(scheduler) == {digests[0]: device, digests[2]: disk})
            seen, told = len(scheduler.of("report")), len(scheduler.of("residency"))
            await until(lambda: len(scheduler.of("report")) > seen + 3)
            assert len(scheduler.of("residency")) == told, "nothing has changed"
            last = scheduler.of("report")[-1]
            assert last.residency_told
            assert not last.resident
            assert last.ByteSize() < 200


def names(told):
    return [one.request for one in told]


def last_list(scheduler):
    """What the last report has listed, as often as it told of it, and how many requests each message has."""
    told: list[list[str]] = []
    more = False
    for up in scheduler.received:
        match up.WhichOneof("message"):
            case "hello" | "report" as kind:
                told = [names(getattr(up, kind).live)]
                more = getattr(up, kind).live_follows
            case "listed":
                assert more, "nobody has said that it follows"
                told.append(names(up.listed.requests))
                more = up.listed.more
    return [] if more else told


async def test_a_scheduler_that_takes_parts_is_told_in_parts_what_runs(folder, monkeypatch):
    monkeypatch.setattr(scheduler_link, "MAX_LISTED_AT_ONCE", 2)
    address, _ = places(folder)
    async with (
        in_process_runner(folder, scheduler=address, engine=functools.partial(SLOW, pages=1000)) as runner,
        gateway_to(runner.address) as gateway,
    ):
        running = [f"x{n}" for n in range(5)]
        for name in running:
            await gateway.submit(name, max_tokens=2000)
        in_parts = [running[:2], running[2:4], running[4:]]
        async with scheduler_at(address) as scheduler:
            scheduler.takes_listed = True
            await until(lambda: last_list(scheduler) == in_parts)
            assert names(scheduler.of("hello")[0].live) == running, "it is not known yet whether it takes parts"
        async with scheduler_at(address) as scheduler:
            scheduler.takes_listed = True
            await until(lambda: scheduler.of("report"))
            hello = scheduler.of("hello")[0]
            assert (names(hello.live), hello.live_follows) == (running[:2], True)
        async with scheduler_at(address) as scheduler:  # of an earlier version
            await until(lambda: len(scheduler.of("hello")) > 1 and scheduler.of("report"))
            hello = scheduler.of("hello")[-1]
            assert (names(hello.live), hello.live_follows) == (running, False)
            assert last_list(scheduler) == [running]


async def test_the_scheduler_learns_what_the_host_keeps_and_metrics_count_what_comes_from_there(folder):
    address, _ = places(folder)
    sources = [write_adapter(folder / f"a{n}", seed=n).as_uri() for n in range(3)]
    small = functools.partial(FakeEngine, adapter_slots=1, host_adapters=2)
    async with scheduler_at(address) as scheduler:
        scheduler.takes_residency = True
        async with (
            in_process_runner(folder, scheduler=address, engine=small) as runner,
            gateway_to(runner.address) as gateway,
        ):
            await until(lambda: scheduler.of("hello"))
            for n, source in enumerate(sources):
                scheduler.ensure(f"a{n}", source)
            a, b, c = [(await scheduler.adapter(f"a{n}")).digest for n in range(3)]
            disk, host = common_pb2.MEMORY_TIER_DISK, common_pb2.MEMORY_TIER_HOST
            for number, digest in enumerate((a, b, a)):
                await gateway.submit(str(number), adapter=digest)
                await gateway.finished(str(number))
            await until(lambda: held(scheduler) == {a: common_pb2.MEMORY_TIER_DEVICE, b: host, c: disk})
            metrics = runner.service.metrics
            value = lambda metric: metric._value.get()  # noqa: E731, SLF001
            assert (value(metrics.adapter_loads), value(metrics.adapter_host_loads)) == (3, 1)
            await until(lambda: value(metrics.host_adapters) == 2)
            assert value(metrics.host_adapter_bytes) == 2 * BLOCK_BYTES
            await gateway.submit("c", adapter=c)
            await gateway.finished("c")
            await until(lambda: held(scheduler) == {a: host, b: disk, c: common_pb2.MEMORY_TIER_DEVICE})


async def test_a_hello_tells_the_first_adapters_and_the_others_follow_in_parts(folder, monkeypatch):
    monkeypatch.setattr(residency, "MAX_TOLD_AT_ONCE", 2)
    address, _ = places(folder)
    sources = [write_adapter(folder / f"a{n}", seed=n).as_uri() for n in range(5)]
    async with in_process_runner(folder, scheduler=address) as runner, gateway_to(runner.address) as gateway:
        async with scheduler_at(address) as before:
            await until(lambda: before.of("hello"))
            for n, source in enumerate(sources):
                before.ensure(f"a{n}", source)
            digests = [(await before.adapter(f"a{n}")).digest for n in range(5)]
            await gateway.submit("x", adapter=digests[4])
            await gateway.finished("x")
        async with scheduler_at(address) as scheduler:
            scheduler.takes_residency = True
            (hello,) = await until(lambda: scheduler.of("hello"))
            assert len(hello.resident) == 2
            assert hello.resident[0].digest == digests[4], "those on the device are first"
            await until(lambda: held(scheduler).keys() == set(digests))
            assert [len(part.resident) for part in scheduler.of("residency")] == [2, 1]
        async with scheduler_at(address) as earlier:
            # One that takes no parts is told all in a report.
            await until(lambda: earlier.of("report") and held(earlier).keys() == set(digests))


def held(scheduler):
    """What a scheduler knows that takes changes."""
    found = {}
    for up in scheduler.received:
        match up.WhichOneof("message"):
            case "hello":
                found = {one.digest: one.tier for one in up.hello.resident}
            case "report" if not up.report.residency_told:
                found = {one.digest: one.tier for one in up.report.resident}
            case "residency":
                for digest in up.residency.gone:
                    found.pop(digest, None)
                found |= {one.digest: one.tier for one in up.residency.resident}
    return found


async def test_what_changes_before_the_welcome_is_told_after_it(folder):
    address, _ = places(folder)
    source = write_adapter(folder / "a0").as_uri()
    async with in_process_runner(folder, scheduler=address, report_seconds=20_000) as runner:
        loaded = runner.service.loaded
        async with scheduler_at(address) as before:
            await until(lambda: before.of("hello"))
            before.ensure("a0", source)
            digest = (await before.adapter("a0")).digest
        async with scheduler_at(address) as scheduler:
            scheduler.takes_residency, scheduler.welcomes_at_once = True, False
            await until(lambda: held(scheduler) == {digest: common_pb2.MEMORY_TIER_DISK})
            loaded.adapters.drop(digest)
            loaded.request_report()
            (report,) = await until(lambda: scheduler.of("report"))
            assert report.residency_told
            assert report.resident_count == 1
            scheduler.send(scheduler.welcome())
            await until(lambda: not held(scheduler))


async def test_a_runner_whose_stream_breaks_tells_all_in_the_next_hello(folder):
    address, _ = places(folder)
    source = write_adapter(folder / "a0").as_uri()
    async with in_process_runner(folder, scheduler=address):
        for attempt in range(2):
            async with scheduler_at(address) as scheduler:
                scheduler.takes_residency = True
                (hello,) = await until(lambda s=scheduler: s.of("hello"))
                assert len(hello.resident) == attempt
                if not attempt:
                    scheduler.ensure("a0", source)
                    await scheduler.adapter("a0")


async def test_ensure_to_the_device_answers_when_it_is_there(folder):
    address, _ = places(folder)
    source = write_adapter(folder / "a0").as_uri()
    async with scheduler_at(address) as scheduler, in_process_runner(folder, scheduler=address):
        await until(lambda: scheduler.of("hello"))
        scheduler.ensure("a0", source, DEVICE)
        await scheduler.adapter("a0", stage=DEVICE)
        scheduler.received.clear()
        scheduler.ensure("a0", source, DEVICE)  # the second time the answer comes at once
        await scheduler.adapter("a0", stage=DEVICE)


async def test_every_answer_repeats_the_number_of_its_order(folder, monkeypatch):
    monkeypatch.setattr(scheduler_link, "PROGRESS_SECONDS", 0.01)
    address, _ = places(folder)
    source = write_adapter(folder / "a0").as_uri()
    async with scheduler_at(address) as scheduler, in_process_runner(folder, scheduler=address) as runner:
        await until(lambda: scheduler.of("hello"))
        may_go_on = asyncio.Event()
        ensure = runner.service.loaded.adapters.ensure

        async def later(order):
            await may_go_on.wait()
            return await ensure(order)

        monkeypatch.setattr(runner.service.loaded.adapters, "ensure", later)
        for order, name, uri in ((11, "a0", source), (12, "a0", source), (13, "none", (folder / "none").as_uri())):
            scheduler.ensure(name, uri, order=order)
        answered = lambda: {one.order for one in scheduler.of("adapter")}  # noqa: E731
        await until(lambda: answered() == {11, 12, 13})  # progress
        assert {one.stage for one in scheduler.of("adapter")} == {common_pb2.ADAPTER_STAGE_UNSPECIFIED}
        scheduler.received.clear()
        may_go_on.set()
        ended = lambda: [one for one in scheduler.of("adapter") if one.stage or one.HasField("failure")]  # noqa: E731
        await until(lambda: len(ended()) == 3)
        assert {one.order: (one.ref.name, one.HasField("failure")) for one in ended()} == {
            11: ("a0", False),
            12: ("a0", False),
            13: ("none", True),
        }
        scheduler.received.clear()
        scheduler.ensure("a0", source, DEVICE, order=14)
        await scheduler.adapter("a0", stage=DEVICE)
        assert {one.order for one in scheduler.of("adapter")} <= {0, 14}, "0: the engine's own news"


class ProvingEngine(FakeEngine):
    """Its first kernels prove all adapters, and later ones none."""

    serving = "torch"

    def __post_init__(self):
        super().__post_init__()
        self.info = replace(self.info, proves=True, kernels=KernelState("torch", 1.0))

    def load_adapter(self, digest, layout, *, pinned=False, proof=None):
        super().load_adapter(digest, layout, pinned=pinned)
        if proof is not None:
            wrong = AdapterUnproved("its results are wrong", reason="ProofFailed")
            found = Proof("torch", 1.0, 0.0) if self.serving == "torch" else wrong
            self.planner.sequences.events.append(ProofEnded(proof.number, digest, found))

    def report(self):
        return replace(super().report(), kernels=KernelState(self.serving, 2.0))


async def test_the_scheduler_hears_of_proofs_also_of_a_later_one_that_fails(folder, monkeypatch):
    address, _ = places(folder)
    source = write_adapter(folder / "a0").as_uri()
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=ProvingEngine),
    ):
        await until(lambda: scheduler.of("hello"))
        scheduler.ensure("a0", source)
        state = await scheduler.adapter("a0", stage=common_pb2.ADAPTER_STAGE_CERTIFIED)
        assert state.certificate.proved_by == ["torch"]
        monkeypatch.setattr(ProvingEngine, "serving", "cpp")
        state = await scheduler.adapter("a0", failed=True)
        assert (state.order, state.digest[:7], state.failure.code) == (0, "sha256:", "adapter_unproved")


class ProvingLater(ProvingEngine):
    """An adapter is on the device before it is proved."""

    ordered = None

    def load_adapter(self, digest, layout, *, pinned=False, proof=None):
        self.ordered = proof and (digest, layout, proof)
        super().load_adapter(digest, layout, pinned=pinned)

    def report(self):
        report = super().report()
        if self.ordered is not None and any(one.on_device for one in report.adapters):
            (digest, layout, proof), self.ordered = self.ordered, None
            super().load_adapter(digest, layout, proof=proof)
        return report


async def test_what_the_answer_to_a_check_tells_is_told_once(folder):
    address, _ = places(folder)
    async with scheduler_at(address) as scheduler, in_process_runner(folder, scheduler=address, engine=ProvingLater):
        await until(lambda: scheduler.of("hello"))
        scheduler.ensure("a0", write_adapter(folder / "a0").as_uri(), order=14)
        state = await scheduler.adapter("a0")
        assert (state.order, state.stage, state.certificate.proved_by) == (14, DEVICE, ["torch"])
        assert {one.order for one in scheduler.of("adapter")} == {14}


async def test_an_adapter_that_leaves_the_device_is_told_without_its_certificate(folder):
    address, _ = places(folder)
    small = functools.partial(FakeEngine, adapter_slots=1)
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=small) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await until(lambda: scheduler.of("hello"))
        for name in ("a0", "a1"):
            scheduler.ensure(name, write_adapter(folder / name, seed=int(name[1:])).as_uri())
            digest = (await scheduler.adapter(name)).digest
            await gateway.submit(name, adapter=digest)
            await gateway.finished(name)

        def news() -> list[scheduler_pb2.AdapterState]:
            return [one for one in scheduler.of("adapter") if one.ref.name == "a0" and not one.answers]

        came, left = await until(lambda: news() if len(news()) == 2 else None)
        assert (came.stage, came.certificate.rank) == (DEVICE, 4)
        assert left.stage == common_pb2.ADAPTER_STAGE_CERTIFIED
        assert not left.HasField("certificate")


async def test_each_later_scheduler_hears_what_the_runner_has_found_wrong_until_it_proves_it(folder, monkeypatch):
    address, _ = places(folder)
    source = write_adapter(folder / "a0").as_uri()
    monkeypatch.setattr(ProvingEngine, "serving", "cpp")
    async with in_process_runner(folder, scheduler=address, engine=ProvingEngine):
        async with scheduler_at(address) as scheduler:
            await until(lambda: scheduler.of("hello"))
            scheduler.ensure("a0", source)
            await scheduler.adapter("a0", failed=True)
        async with scheduler_at(address) as scheduler:
            (hello,) = await until(lambda: scheduler.of("hello"))
            (refused,) = hello.refused
            assert hello.refused_is_all
            assert (refused.digest[:7], refused.failure.reason) == ("sha256:", "ProofFailed")
            monkeypatch.setattr(ProvingEngine, "serving", "torch")
            scheduler.ensure("a0", source)
            await scheduler.adapter("a0", stage=common_pb2.ADAPTER_STAGE_CERTIFIED)
        async with scheduler_at(address) as scheduler:
            (hello,) = await until(lambda: scheduler.of("hello"))
            assert (len(hello.refused), hello.refused_is_all) == (0, True)


async def test_a_broken_adapter_is_refused_with_its_reason(folder):
    address, _ = places(folder)
    broken = write_adapter(folder / "bad", use_dora=True).as_uri()
    async with scheduler_at(address) as scheduler, in_process_runner(folder, scheduler=address):
        await until(lambda: scheduler.of("hello"))
        scheduler.ensure("bad", broken)
        state = await scheduler.adapter("bad", failed=True)
        assert state.failure.code == "adapter_incompatible"
        assert "use_dora" in state.failure.message
        scheduler.ensure("none", (folder / "none").as_uri())
        state = await scheduler.adapter("none", failed=True)
        assert state.failure.code == "adapter_fetch_failed"
        assert str(folder / "none") in state.failure.message


async def test_a_request_waits_for_its_adapter(folder):
    address, _ = places(folder)
    source = write_adapter(folder / "a0")
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, adapter_wait_seconds=1000) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await until(lambda: scheduler.of("hello"))
        digest = adapter_digest(source)
        await gateway.submit("early", adapter=digest)
        await until(lambda: gateway.progress("early") == [common_pb2.SEQUENCE_STATE_LOADING])
        assert {entry.state for entry in runner.service.accepted.runner_requests(None)} == {
            common_pb2.SEQUENCE_STATE_LOADING
        }
        scheduler.ensure("a0", source.as_uri(), DEVICE)
        await gateway.finished("early")
        assert len(runner.service.accepted) == 0


async def test_a_request_whose_adapter_does_not_come_is_declined(folder):
    async with in_process_runner(folder, adapter_wait_seconds=1) as runner, gateway_to(runner.address) as gateway:
        await gateway.submit("lost", adapter="sha256:" + "0" * 64)
        declined = await gateway.refusal("lost")
        assert declined.failure.code == "declined"
        assert "did not arrive" in declined.failure.message
        assert declined.failure.reason == "", "more free pages would not help"
        assert len(runner.service.accepted) == 0


async def test_a_request_that_waits_for_its_adapter_can_be_cancelled(folder):
    async with in_process_runner(folder, adapter_wait_seconds=1000) as runner, gateway_to(runner.address) as gateway:
        await gateway.submit("a", adapter="sha256:" + "0" * 64)
        await gateway.cancel("a")
        assert (await gateway.finished("a")).finish == common_pb2.FINISH_REASON_CANCELLED
        assert len(runner.service.accepted) == 0


async def test_expect_brings_a_known_adapter_to_the_device(folder):
    address, _ = places(folder)
    source = write_adapter(folder / "a0").as_uri()
    async with scheduler_at(address) as scheduler, in_process_runner(folder, scheduler=address) as runner:
        await until(lambda: scheduler.of("hello"))
        scheduler.ensure("a0", source)
        state = await scheduler.adapter("a0")
        expect = scheduler_pb2.Expect(term=1, request="a", epoch=4, adapter_digest=state.digest)
        scheduler.send(scheduler_pb2.AttachDown(expect=expect))
        await scheduler.adapter("a0", stage=DEVICE)
        async with gateway_to(runner.address) as gateway:
            await gateway.submit("a", epoch=3)  # the announced adapter is newer
            await gateway.refusal("a", 3)


async def test_an_evicted_adapter_is_told_by_itself(folder):
    """No report says it: the next one is due in a thousand seconds."""
    address, _ = places(folder)
    sources = [write_adapter(folder / name, seed=number).as_uri() for number, name in enumerate(("a0", "a1"))]
    engine = functools.partial(FakeEngine, adapter_slots=1)
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=engine, report_seconds=20_000) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await until(lambda: scheduler.of("hello"))
        for name, source in zip(("a0", "a1"), sources, strict=True):
            scheduler.ensure(name, source)
            digest = (await scheduler.adapter(name)).digest
            reports = len(scheduler.of("report"))
            await gateway.submit(name, adapter=digest)
            await gateway.finished(name)
            await scheduler.adapter(name, stage=DEVICE)
        assert len(scheduler.of("report")) == reports
        last = [one for one in scheduler.of("adapter") if one.ref.name == "a0"][-1]
        assert (last.stage, last.order) == (common_pb2.ADAPTER_STAGE_CERTIFIED, 0)


@pytest.mark.parametrize("what", ["no name", "no folder"])
async def test_a_report_says_where_an_evicted_adapter_is_if_nothing_else_does(folder, what):
    """All manifests of the adapter are gone, or the disk cache has evicted it, and a request has it looked for."""
    address, _ = places(folder)
    sources = [write_adapter(folder / name, seed=number).as_uri() for number, name in enumerate(("a0", "a1"))]
    engine = functools.partial(FakeEngine, adapter_slots=1)
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=engine, report_seconds=20_000) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await until(lambda: scheduler.of("hello"))
        scheduler.ensure("a0", sources[0], DEVICE)
        digest = (await scheduler.adapter("a0", stage=DEVICE)).digest
        life = runner.service.loaded.adapters.get(digest)
        if what == "no name":
            ref = common_pb2.AdapterRef(namespace="default", name="a0", generation=1)
            scheduler.send(scheduler_pb2.AttachDown(drop=scheduler_pb2.DropAdapter(term=1, adapter=ref)))
            await until(lambda: not life.generations)
        else:
            life.waiters[0], life.held = "", None
        reports = len(scheduler.of("report"))
        scheduler.ensure("a1", sources[1])
        await gateway.submit("x", adapter=(await scheduler.adapter("a1")).digest)
        await gateway.finished("x")
        await until(lambda: len(scheduler.of("report")) > reports)
        tiers = {one.digest: one.tier for one in scheduler.of("report")[-1].resident}
        assert tiers.get(digest) == (common_pb2.MEMORY_TIER_DISK if what == "no name" else None)


async def test_a_dropped_adapter_is_forgotten_after_its_last_request(folder):
    address, _ = places(folder)
    source = write_adapter(folder / "a0").as_uri()
    async with (
        scheduler_at(address) as scheduler,
        in_process_runner(folder, scheduler=address, engine=(engines := SlowEngines())) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await until(lambda: scheduler.of("hello"))
        scheduler.ensure("a0", source, DEVICE)
        digest = (await scheduler.adapter("a0", stage=DEVICE)).digest
        await gateway.submit("x", adapter=digest, max_tokens=60)
        await until(lambda: gateway.tokens.get(("x", 1)))
        scheduler.send(scheduler_pb2.AttachDown(drop=scheduler_pb2.DropAdapter(term=1, digest=digest)))
        engines.hurry()
        await gateway.finished("x")
        assert gateway.tokens["x", 1] == tokens_of((1, 2, 3), 7, 60, digest)
        seen = len(scheduler.of("report"))
        await until(lambda: len(scheduler.of("report")) > seen + 1)
        assert not scheduler.of("report")[-1].resident


async def test_orders_of_a_past_term_are_ignored(folder):
    address, _ = places(folder)
    source = write_adapter(folder / "a0").as_uri()
    async with scheduler_at(address) as scheduler, in_process_runner(folder, scheduler=address) as runner:
        scheduler.term = 1
        await until(lambda: scheduler.of("hello"))
        scheduler.send(scheduler_pb2.AttachDown(welcome=common_pb2.Welcome(term=9)))
        scheduler.send(scheduler_pb2.AttachDown(drain=scheduler_pb2.Drain(term=8)))
        scheduler.term = 9
        scheduler.ensure("a0", source)
        await scheduler.adapter("a0")
        assert not runner.service.draining
        assert runner.service.accepted.highest_term == 9


async def test_an_overflow_is_extended_by_the_supervisors_order(folder):
    _, address = places(folder)
    async with (
        supervisor_at(address) as supervisor,
        in_process_runner(folder, supervisor=address, supervisor_answer_seconds=1000) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await until(lambda: supervisor.of("memory"))
        await gateway.submit("a", max_tokens=60, pages=1)
        for promise, extended in ((1, 2), (2, 4)):
            overflow = await until(
                lambda p=promise: next((o for o in supervisor.of("overflow") if o.request.promise.pages == p), None)
            )
            assert overflow.request.request == "a"
            assert overflow.pages_free > 250
            for void in (promise + 5, promise):  # the first one names a promise that the request does not have
                order = supervisor_pb2.Extend(
                    request="a", epoch=1, promise={"pages": void}, extended={"pages": extended}
                )
                supervisor.send(supervisor_pb2.WatchDown(extend=order))
        await gateway.finished("a")
        assert gateway.tokens["a", 1] == tokens_of((1, 2, 3), 7, 60)
        (ended,) = await until(lambda: supervisor.of("ended"))
        assert (ended.request, ended.output_tokens) == ("a", 60)
        assert not supervisor.of("parked")


@pytest.mark.parametrize(("preset", "charged"), [("paged-chunk", 1), ("paged-promises", 5)])
async def test_an_overflow_says_what_is_charged_for_a_promise_that_grew_since_the_report(folder, preset, charged):
    """Its new pages are charged, too; but a part of a forecast stays what it was."""
    _, address = places(folder)
    engine = functools.partial(SharingEngine, step_seconds=0.02, preset=preset)
    async with (
        supervisor_at(address) as supervisor,
        in_process_runner(folder, supervisor=address, engine=engine, supervisor_answer_seconds=1000) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await gateway.submit("a", max_tokens=1000, pages=100)
        await until(lambda: any(x.pages_used for report in supervisor.of("memory") for x in report.live))
        entry = EngineSequenceReport(
            RequestId("a"), 1, 104, 103, State.DECODE, 3, 1640, BASE, "t", 0, 2, promise_number=2
        )
        runner.service.loaded.supervisor.overflow(OverflowAhead(entry))
        (overflow,) = await until(lambda: supervisor.of("overflow"))
        said = overflow.request
        assert (said.promise.pages, said.promise.number, said.charged_pages) == (104, 2, charged)
        assert (said.pages_used, said.output_tokens, said.parked_times) == (103, 1640, 2), "as of now"


async def test_park_and_resume_by_order_lose_no_token(folder):
    _, address = places(folder)
    async with (
        supervisor_at(address) as supervisor,
        in_process_runner(folder, supervisor=address, engine=(engines := SlowEngines())) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await until(lambda: supervisor.of("memory"))
        await gateway.submit("a", max_tokens=120, pages=4)
        await until(lambda: gateway.tokens.get(("a", 1)))
        park = supervisor_pb2.Park(
            request="a", epoch=1, promise={"pages": 4}, doubled={"pages": 8}, method=common_pb2.PARK_METHOD_SWAP
        )
        supervisor.send(supervisor_pb2.WatchDown(park=park))
        (parked,) = await until(lambda: supervisor.of("parked"))
        assert (parked.promise.pages, parked.method, parked.by_itself) == (8, common_pb2.PARK_METHOD_SWAP, False)
        await until(lambda: common_pb2.SEQUENCE_STATE_PARKED in gateway.progress("a"))
        engines.hurry()
        resume = supervisor_pb2.Resume(request="a", epoch=1, promise={"pages": 8})
        supervisor.send(supervisor_pb2.WatchDown(resume=resume))
        await until(lambda: supervisor.of("resumed"))
        await gateway.finished("a")
        assert gateway.tokens["a", 1] == tokens_of((1, 2, 3), 7, 120)
        assert value_of(runner.service.metrics.parks.labels("swap")) == 1
        assert value_of(runner.service.metrics.resumes.labels("swap")) == 1


async def test_orders_name_the_number_of_a_promise_and_old_ones_are_void(folder):
    """The promise has as many pages as before, but it is another one."""
    _, address = places(folder)
    async with (
        supervisor_at(address) as supervisor,
        in_process_runner(folder, supervisor=address, engine=SLOW) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await until(lambda: supervisor.of("memory"))
        await gateway.submit("a", max_tokens=2000, pages=120)

        def now() -> common_pb2.Promise | None:
            live = supervisor.of("memory")[-1].live
            return next((one.promise for one in live if one.promise.number), None)

        first = await until(now)
        park = {"request": "a", "epoch": 1, "promise": first, "doubled": {"pages": 120}}
        supervisor.send(supervisor_pb2.WatchDown(park=supervisor_pb2.Park(**park)))
        (parked,) = await until(lambda: supervisor.of("parked"))
        old = supervisor_pb2.Resume(request="a", epoch=1, promise=first)
        supervisor.send(supervisor_pb2.WatchDown(resume=old))
        reports = len(supervisor.of("memory"))
        await until(lambda: len(supervisor.of("memory")) > reports + 1)
        (refused,) = await until(lambda: supervisor.of("refused"))
        assert refused.promise.number == first.number
        assert not supervisor.of("resumed")
        resume = supervisor_pb2.Resume(request="a", epoch=1, promise=parked.promise)
        supervisor.send(supervisor_pb2.WatchDown(resume=resume))
        (resumed,) = await until(lambda: supervisor.of("resumed"))
        assert first.number < parked.promise.number < resumed.promise.number
        supervisor.send(supervisor_pb2.WatchDown(park=supervisor_pb2.Park(**park)))
        extend = supervisor_pb2.Extend(request="a", epoch=1, promise=first, extended={"pages": 124})
        supervisor.send(supervisor_pb2.WatchDown(extend=extend))
        seen = len(gateway.tokens["a", 1])
        await until(lambda: len(gateway.tokens["a", 1]) > seen + 10)
        assert len(supervisor.of("parked")) == 1
        assert await until(lambda: now() if now().number == resumed.promise.number else None) == resumed.promise


async def test_the_supervisors_orders_of_a_past_term_are_ignored(folder):
    _, address = places(folder)
    async with (
        supervisor_at(address) as supervisor,
        in_process_runner(folder, supervisor=address, engine=SLOW) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await until(lambda: supervisor.of("memory"))
        runner.service.accepted.accepts_term(7)
        await gateway.submit("a", max_tokens=2000, pages=126, term=7)
        await until(lambda: gateway.tokens.get(("a", 1)))
        order = {"request": "a", "epoch": 1, "promise": {"pages": 126}, "doubled": {"pages": 130}}
        for term in (6, 1):
            supervisor.send(supervisor_pb2.WatchDown(park=supervisor_pb2.Park(**order, term=term)))
        seen = len(gateway.tokens["a", 1])
        await until(lambda: len(gateway.tokens["a", 1]) > seen + 10)
        assert not supervisor.of("parked")
        supervisor.send(supervisor_pb2.WatchDown(park=supervisor_pb2.Park(**order, term=8)))
        await until(lambda: supervisor.of("parked"))
        assert runner.service.accepted.highest_term == 7, "a term is learned from schedulers"
        # One that no scheduler has told anything goes by itself.
        supervisor.send(
            supervisor_pb2.WatchDown(resume=supervisor_pb2.Resume(request="a", epoch=1, promise={"pages": 130}))
        )
        await until(lambda: supervisor.of("resumed"))


async def test_without_a_supervisor_the_runner_protects_itself(folder):
    tight = SlowEngines(pages=8)
    async with (
        in_process_runner(folder, engine=tight) as runner,
        gateway_to(runner.address) as gateway,
    ):
        for n in range(4):
            await gateway.submit(f"r{n}", max_tokens=70, pages=1, seed=n)
        await until(lambda: len(gateway.tokens) == 4)
        tight.hurry()
        for n in range(4):
            await gateway.finished(f"r{n}")
            assert gateway.tokens[f"r{n}", 1] == tokens_of((1, 2, 3), n, 70)
        assert value_of(runner.service.metrics.self_parks) > 0


async def test_a_runner_with_a_silent_supervisor_protects_itself(folder):
    _, address = places(folder)
    tight = SlowEngines(pages=8)
    async with (
        supervisor_at(address) as supervisor,
        in_process_runner(folder, supervisor=address, engine=tight) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await until(lambda: supervisor.of("memory"))
        for n in range(4):
            await gateway.submit(f"r{n}", max_tokens=70, pages=1, seed=n)
        await until(lambda: len(gateway.tokens) == 4)
        tight.hurry()
        for n in range(4):
            await gateway.finished(f"r{n}")
        # The supervisor's stream is another one than the gateway's: its last messages may come later.
        await until(lambda: supervisor.of("overflow"))
        await until(lambda: any(parked.by_itself for parked in supervisor.of("parked")))


async def test_a_supervisor_that_reconnects_is_sent_everything(folder):
    _, address = places(folder)
    async with (
        in_process_runner(folder, supervisor=address, engine=SLOW) as runner,
        gateway_to(runner.address) as gateway,
    ):
        await gateway.submit("a", max_tokens=2000)
        await until(lambda: gateway.tokens.get(("a", 1)))
        for _ in range(2):
            async with supervisor_at(address) as supervisor:
                (hello,) = await until(lambda s=supervisor: s.of("hello"))
                assert [live.request for live in hello.live] == ["a"]
