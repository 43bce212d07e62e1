"""Events with good defaults, and a scheduler on a fake clock, so that a test shows only what it is about."""

from collections.abc import Iterator
from typing import Any

from motet.clock import FakeClock
from motet.domain import BASE, Digest, InstanceName, ObjectName, RequestId, Tenant
from motet.runner_info import (
    Capacity,
    Failure,
    KernelState,
    RequestClass,
    RunnerIdentity,
    RunnerRequest,
    SequenceState,
    Tier,
)
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.catalog import SavedCatalog
from motet_scheduler.policy.order import order_of
from motet_scheduler.policy.queue import Queue
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runner_choice import Chosen, choose
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import (
    AdapterRef,
    AdapterSpec,
    AdapterStage,
    BaseModel,
    Certificate,
    Estimate,
    GroupName,
    PoolSpec,
    Promise,
    RevisionKey,
    SchedulerConfig,
)

GROUP = GroupName("default/demo")
PIRATE = Digest("sha256:" + "a" * 64)
POET = Digest("sha256:" + "b" * 64)


def pool(**how: Any) -> PoolSpec:
    return PoolSpec(**({"pool": "default/demo", "group": GROUP, "served_name": "demo"} | how))


def adapter(name: str = "pirate", *, stamp: str = "1", namespace: str = "default", **how: Any) -> AdapterSpec:
    revision = RevisionKey(source=f"file:///adapters/{name}", content_stamp=stamp)
    ref = AdapterRef(namespace, name, 1)
    return AdapterSpec(**({"ref": ref, "group": GROUP, "model_name": name, "revision": revision} | how))


def entry(request: str, pages: int, *, epoch: int = 1, parked: bool = False, **how: Any) -> RunnerRequest:
    state = SequenceState.PARKED if parked else SequenceState.DECODE
    return RunnerRequest(
        **({"request": RequestId(request), "epoch": epoch, "pages": pages, "state": state, "gateway": "g0"} | how)
    )


def resident(digest: Digest, tier: Tier = Tier.DEVICE) -> dict[Digest, Tier]:
    return {digest: tier}


class SchedulerDriver:
    """A scheduler on a fake clock. Each method sends one event and returns the effects."""

    def __init__(
        self, *, saved: SavedCatalog | None = None, now: float = 1000.0, first_order: int = 1, **config: Any
    ) -> None:
        self.clock = FakeClock(now)
        config_ = SchedulerConfig(**config)
        self.scheduler = Scheduler(config_, now=self.clock(), saved=saved, first_order=first_order)
        self.effects: list[effects.Effect] = []
        self.orders: dict[tuple[str, ObjectName, AdapterStage], int] = {}
        """The number of the last order to a runner about an adapter."""

    def send(self, event: events.Event) -> list[effects.Effect]:
        return self.note(self.scheduler.handle(event, self.clock()))

    def note(self, decided: list[effects.Effect]) -> list[effects.Effect]:
        self.effects = decided
        self.scheduler.check()
        for order in self.of(effects.EnsureAdapter):
            self.orders[order.instance, order.ref.object, order.stage] = order.order
        return self.effects

    def of(self, kind: type) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def ledger(self, instance: str = "r0") -> dict[tuple[str, int], int]:
        return dict(self.scheduler.runners[InstanceName(instance)].ledger)

    def where(self, request: str) -> str:
        placement = self.scheduler.requests[RequestId(request)].placement
        return placement.instance if placement is not None else ""

    # ----------------------------------------------------------------------------------------------------- gateways

    def gateway(self, name: str = "g0", *live: events.LiveRequest) -> list[effects.Effect]:
        return self.send(events.GatewayConnected(name, live))

    def enqueue(
        self,
        request: str,
        *,
        prompt: int = 16,
        max_tokens: int = 64,
        q80: int = 0,
        tenant: str = "acme",
        digest: Digest = BASE,
        **how: Any,
    ) -> list[effects.Effect]:
        fields: dict[str, Any] = {
            "gateway": "g0",
            "request": RequestId(request),
            "tenant": Tenant(tenant),
            "group": GROUP,
            "digest": digest,
            "request_class": RequestClass.STANDARD,
            "prompt_tokens": prompt,
            "max_tokens": max_tokens,
            "estimate": Estimate(q80=q80),
        }
        return self.send(events.Enqueued(**(fields | how)))

    def live(
        self, request: str, *, instance: str = "r0", epoch: int = 1, pages: int = 2, **how: Any
    ) -> events.LiveRequest:
        fields: dict[str, Any] = {
            "request": RequestId(request),
            "epoch": epoch,
            "instance": InstanceName(instance),
            "incarnation": "1",
            "promise": Promise(pages),
            "tenant": Tenant("acme"),
            "group": GROUP,
            "digest": BASE,
            "prompt_tokens": 16,
            "max_tokens": 64,
        }
        return events.LiveRequest(**(fields | how))

    def finish(self, request: str, epoch: int = 1, *, gateway: str = "g0") -> list[effects.Effect]:
        return self.send(events.RequestFinished(gateway, RequestId(request), epoch))

    def cancel(self, request: str, *, gateway: str = "g0") -> list[effects.Effect]:
        return self.send(events.CancelRequested(gateway, RequestId(request)))

    def lose(self, request: str, epoch: int = 1, delivered: int = 0, *, gateway: str = "g0") -> list[effects.Effect]:
        return self.send(events.RequestLost(gateway, RequestId(request), epoch, "stream broke", delivered))

    # ------------------------------------------------------------------------------------------------------ runners

    def attach(
        self,
        instance: str = "r0",
        *,
        pages: int = 100,
        incarnation: str = "1",
        live: tuple[RunnerRequest, ...] = (),
        resident: dict[Digest, Tier] | None = None,
        group: str = GROUP,
        pool: str = "default/demo",
        revision: str = "",
        base: str = "sha256:base",
        assets: str = "sha256:assets",
        refused: dict[Digest, Failure] | None = None,
        refused_is_all: bool = True,
        kernels: KernelState | None = None,
        **capacity: Any,
    ) -> list[effects.Effect]:
        return self.send(
            events.RunnerAttached(
                identity=RunnerIdentity(
                    instance=instance, incarnation=incarnation, pool=pool, group=group, revision=revision
                ),
                address=f"unix:/run/{instance}.sock",
                capacity=Capacity(pages=pages, **capacity),
                base=BaseModel(digest=base, asset_digest=assets),
                kernels=kernels,
                live=live,
                resident=resident or {},
                refused=refused or {},
                refused_is_all=refused_is_all,
            )
        )

    def detach(self, instance: str = "r0", incarnation: str = "1") -> list[effects.Effect]:
        return self.send(events.RunnerDetached(InstanceName(instance), incarnation))

    def report(
        self,
        instance: str = "r0",
        *live: RunnerRequest,
        incarnation: str = "1",
        resident: dict[Digest, Tier] | None = None,
        steps: int = 0,
        pages: int = 0,
        pages_free: int = 0,
        cached: tuple[int, ...] = (),
        **how: Any,
    ) -> list[effects.Effect]:
        return self.send(
            events.RunnerReported(
                instance=InstanceName(instance),
                incarnation=incarnation,
                live=live,
                resident=resident or {},
                steps=steps,
                pages=pages,
                pages_free=pages_free,
                cached_prefixes=frozenset(cached),
                **how,
            )
        )

    def ended(
        self, request: str, epoch: int = 1, *, instance: str = "r0", incarnation: str = "1"
    ) -> list[effects.Effect]:
        """A runner says that the sequence has ended."""
        return self.send(events.SequencesEnded(InstanceName(instance), incarnation, ((RequestId(request), epoch),)))

    def certify(
        self, name: str = "pirate", digest: Digest = PIRATE, *, instance: str = "r0", **how: Any
    ) -> list[effects.Effect]:
        """A runner answers its last order about an adapter, by default to check it."""
        fields: dict[str, Any] = {
            "instance": InstanceName(instance),
            "ref": AdapterRef("default", name, 1),
            "digest": digest,
            "stage": AdapterStage.CERTIFIED,
            "certificate": Certificate(digest=digest, rank=8, proved_by=("torch",)),
            "ordered_stage": AdapterStage.CERTIFIED,
        }
        fields |= how
        asked = (fields["instance"], fields["ref"].object, fields["ordered_stage"])
        return self.send(events.AdapterStateChanged(**({"order": self.orders.get(asked, 0)} | fields)))

    # -------------------------------------------------------------------------------------------- operator, time

    def state(self, *adapters: AdapterSpec, pools: tuple[PoolSpec, ...] = (pool(),)) -> list[effects.Effect]:
        return self.send(events.CatalogReplaced(pools, adapters))

    def wait(self, seconds: float) -> list[effects.Effect]:
        self.clock.advance(seconds)
        return self.send(events.Tick())


def ready(**config: Any) -> SchedulerDriver:
    """A scheduler with one gateway and a catalog, and no runner yet."""
    driver = SchedulerDriver(**config)
    driver.gateway()
    driver.state()
    return driver


def reserved(driver: SchedulerDriver) -> dict[str, str]:
    """The runners that are reserved, and for which requests."""
    return {runner.instance: request.id for runner, request in driver.scheduler.queues[GROUP].reserved.items()}


def who_fits(driver: SchedulerDriver) -> Iterator[tuple[str, str]]:
    """Of those that wait and are the first of their flows: who has room, and on which runner."""
    state, queue = driver.scheduler.state, driver.scheduler.state.queue(GROUP)
    for request in queue.heads():
        reserved, kept = queue.reserved_from(request), queue.kept_from(request)
        found = choose(request, state.runners_for(request), state.config, state.now, reserved=reserved, kept=kept)
        if isinstance(found, Chosen):
            yield request.id, found.runner.instance


def check_order(driver: SchedulerDriver) -> None:
    """From now on, nothing is placed while an earlier request of its class, or a more urgent one, fits somewhere. A
    class may have its floor, and those for whom a runner is reserved may go first: nobody else may have their place."""
    state, queue_of = driver.scheduler.state, driver.scheduler.state.queue

    def checked(queue: Queue) -> Queue:
        """It looks before the tenant of the request is charged, so that all is as it was when that was chosen."""
        remove_placed = queue.remove_placed

        def check_and_remove(request: Request, runner: Runner, *, near: bool = False) -> None:
            for other in queue.heads() if queue.reserved.get(runner) is not request else ():
                before = other is not request and order_of(other) < order_of(request)
                urgent = other.request_class < request.request_class and queue.early is not request.request_class
                if urgent or (other.request_class is request.request_class and before):
                    runners, reserved = state.runners_for(other), queue.reserved_from(other)
                    kept, config = queue.kept_from(other), driver.scheduler.config
                    outcome = choose(other, runners, config, driver.clock(), reserved=reserved, kept=kept)
                    assert not isinstance(outcome, Chosen), f"{request.id} is placed before {other.id}"
            remove_placed(request, runner, near=near)

        queue.remove_placed = check_and_remove  # type: ignore[method-assign]
        return queue

    def queue(group: GroupName) -> Queue:
        return state.queues[group] if group in state.queues else checked(queue_of(group))

    for one in state.queues.values():
        checked(one)
    state.queue = queue  # type: ignore[method-assign]
