"""One request, and how many pages it is promised."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2
from typing import TYPE_CHECKING, NamedTuple

from motet import promises
from motet.domain import Digest, InstanceName, RequestId, Tenant
from motet.runner_info import Capacity, Failure, RequestClass, RunnerIdentity
from motet.value import value
from motet_scheduler.policy.gateway_requests import NOT_OVER, Asked
from motet_scheduler.policy.quotas.draws import Draw
from motet_scheduler.policy.shares import Charge, Flow, Share, Turn
from motet_scheduler.policy.timeline import Story
from motet_scheduler.policy.values import Estimate, GroupName, KeyAccount, Promise, SchedulerConfig

if TYPE_CHECKING:
    from motet_scheduler.policy.runners import Runner

QueueKey = tuple[float, int]
"""`turn_at`, then order of arrival here. Unique; the smallest is the oldest."""

SIZES_PER_DOUBLING = 2
"""How finely the sizes of class Batch are told apart: each size of a tenant is a flow."""

HEAD_START_PER_SIZE = 5.0
"""Of class Batch, a request goes before one of the next smaller size that was asked for at most these seconds before
it (S3-05). All sizes together are less than the deadlines that gateways set, or the smallest would reach theirs."""

CapacityId = int
"""The identity of a Capacity: runners of equal capacity share one object."""

PageNeed = tuple[int, int]
"""How many pages a request needs, and how many its adapter takes beside them."""


Reason = tuple[object, ...]
"""Why a request waits: together, its parts are the words, which are made when somebody asks for them."""


NO_NEEDS: Mapping[CapacityId, PageNeed] = {}


class SomeOf(NamedTuple):
    """What a request waits for that only some runners could ever take. It is passed only there, so nobody else counts
    who waits for all of them."""

    runners_of: str
    capacities: frozenset[CapacityId]
    """Those that could hold it."""
    without: frozenset[str]
    """Runners that have refused it for good."""

    def has(self, runner: "Runner") -> bool:
        """Whether this one could take it, of those that it waits for."""
        return id(runner.capacity) in self.capacities and runner.instance not in self.without


WaitsFor = str | SomeOf
"""Whose runners a request waits for: the digest of its base model, or of its adapter, and which of these, if not all
could take it."""


@value()
class Placement:
    """Where a request runs, under which epoch. The incarnation distinguishes a restarted runner from the process
    before."""

    instance: InstanceName
    incarnation: str
    epoch: int
    at: float

    def is_at(self, runner: RunnerIdentity, epoch: int) -> bool:
        """What any other runner says about it counts for nothing."""
        return (epoch, runner.instance, runner.incarnation) == (self.epoch, self.instance, self.incarnation)


@value()
class Requirement:
    """What a request needs on a runner of this capacity, after `delivered` tokens."""

    capacity: Capacity
    delivered: int
    adapter_pages: int
    """That its adapter takes beside it."""
    never: str
    """Why even an empty runner could not hold it (OR-09); empty if it could."""
    promise: Promise
    room: int
    """Free pages with which it is tried: those of its promise, and as many more for each time that a runner had too
    little room after all. Who knows why: at last it is tried on an empty one."""
    room_lacked: int
    """The request's, when this was found."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    id: RequestId
    gateway: str
    tenant: Tenant
    group: GroupName
    digest: Digest
    adapter: str = ""
    """The adapter that its client names, as namespace/name. Empty: its gateway does not say."""
    base: str = ""
    """The digest of its base model: no other one may continue it. If its gateway does not say, the base model of the
    first runner that gets it."""
    request_class: RequestClass
    prompt_tokens: int
    max_tokens: int
    """Of output, including delivered ones; 0 if the request is known only from a runner's report."""
    delivered: int = 0
    estimate: Estimate = field(default_factory=Estimate)
    asked_at: float
    sequence: int = 0
    """Orders requests that were asked for at the same time. The lifecycle sets it."""
    queue_timeout: float = 0.0
    """Seconds of each wait in the queue; 0: no limit. The first is shorter if it has waited without a scheduler."""
    deadline_at: float | None = None
    """When it gives up. Only as long as it is in the queue."""
    waits_for: WaitsFor | None = None
    """None: it has not been tried."""
    flow: Flow = ("", "", 0)
    """Only as long as it is in the queue."""
    share: Share | None = None
    """Of its tenant in its class, once it has been in the queue."""
    charge: Charge | None = None
    """What its tenant was charged for it. None: it was not placed yet."""
    passes_from: int = 0
    """Placements that passed others of its class before it came, or had its turn later than before."""
    passes: int = 0
    """How many have passed it until then, since it last got a token."""
    replaced: bool = False
    """Its revision was found to be replaced: nothing says where its bytes are, so only runners that hold it count."""
    page_needs: Mapping[CapacityId, PageNeed] = field(default_factory=lambda: NO_NEEDS)
    """On the runners of its group that could hold it, when it began to wait for these."""
    epoch: int = 0
    placement: Placement | None = None
    left: Placement | None = None
    """The placement that it had last and has no more: it was lost, or the request moves."""
    moved_reason: str = ""
    engine_hung: bool = False
    """Whether the engine of the runner that it leaves hangs."""
    asked: Asked = NOT_OVER
    """Those that may be over together with it."""
    avoid: dict[str, float] = field(default_factory=dict)
    """Runners to avoid, and until when."""
    declines: int = 0
    room_lacked: int = 0
    """How often runners declined it for lack of room, since it last got a token."""
    declined_epoch: int = 0
    """Of the placement that was declined last."""
    unfetched_since: float | None = None
    """When a runner could first not fetch its adapter, since it last got a token."""
    unable: Failure | None = None
    """Why some runners can never take it: with it the request is refused if no other one may."""
    unable_on: frozenset[tuple[str, str]] = frozenset()
    """The pool and the revision of these: a runner of the same name may be made otherwise after a restart."""
    final_failure: object | None = None
    """The failure of a runner that applies to all runners."""
    why: Reason | None = None
    """Why it waits. None: nobody has looked."""
    waits_for_what: str = ""
    """The kind of this reason, without numbers, as its timeline has it."""
    reported_position: tuple[int, Reason | None] = (0, None)
    parent: RequestId | None = None
    """The first choice of the same call; None: this is it."""
    choices: int = 1
    """How many choices the call has, with this one."""
    prefix_hints: tuple[int, ...] = ()
    """Of the first pages of its prompt."""
    api_key: KeyAccount | None = None
    """The API key that it came with, if that has limits."""
    draw: Draw | None = None
    """What it has of the quotas of its tenant, its adapter and its key. None: nothing limits it."""
    story: Story = field(init=False, repr=False)
    """What happened to it, once it has begun."""
    need: Requirement | None = None
    """Cached: a request is tried many times before it is placed."""
    size: int = field(init=False, default=0)
    """Of class Batch: by what it is expected to hold in the end. Other classes have none."""
    may_run_from: float = field(init=False)
    """When it was asked for, or when its quota let it in, if it had to wait for that."""
    turn_at: float = field(init=False)
    """Its age as the queue counts it: when it was asked for, and for class Batch earlier, the larger it is."""

    def __post_init__(self) -> None:
        if self.request_class is RequestClass.BATCH:
            tokens = self.prompt_tokens + min(self.max_tokens, self.estimate.q80 or self.max_tokens)
            self.size = int(SIZES_PER_DOUBLING * log2(max(1, tokens)))
        self.may_run_from = self.asked_at
        self.turn_at = self.asked_at - HEAD_START_PER_SIZE * self.size

    @property
    def key(self) -> QueueKey:
        return (self.turn_at, self.sequence)

    @property
    def turn(self) -> Turn:
        """One that had a place, and lost it, has its turn again before those that had none."""
        return (self.charge is None, self.turn_at, self.sequence)

    @property
    def own_prompt_tokens(self) -> int:
        """Further choices of a call share the prompt of the first."""
        return self.prompt_tokens if self.parent is None else 0

    @property
    def waits_since(self) -> float:
        """Since when it waits for a runner, also without a scheduler, if it has a deadline; else since the client
        asked."""
        since = self.deadline_at - self.queue_timeout if self.deadline_at is not None else self.asked_at
        return max(since, self.may_run_from)

    @property
    def first_deadline_at(self) -> float | None:
        """When it gives up if all that take it decline it. It follows from its age alone, which its gateway tells a new
        scheduler, too; the gateway ends it then in any case."""
        return self.asked_at + self.queue_timeout if self.queue_timeout > 0 else None

    @property
    def waiting(self) -> bool:
        return self.placement is None

    @property
    def waiting_reason(self) -> str:
        return "".join(map(str, self.why or ()))

    @property
    def forgotten(self) -> bool:
        """Its gateway has gone, or no longer knows it. It ends soon, without another word."""
        return self.asked.over

    def runs_on(self, runner: RunnerIdentity, epoch: int) -> bool:
        """Whether this is its placement."""
        return self.placement is not None and self.placement.is_at(runner, epoch)

    def has_left(self, runner: RunnerIdentity, epoch: int) -> bool:
        """Whether this is the placement that it had last and has no more."""
        return self.left is not None and self.left.is_at(runner, epoch)

    @property
    def held(self) -> bool:
        """Whether it waits for its quota, and is in no queue."""
        return self.draw is not None and self.draw.waits_for is not None

    def requirement_on(self, capacity: Capacity, config: SchedulerConfig, adapter_pages: int = 0) -> Requirement:
        need = self.need
        if (
            need is None
            or need.capacity is not capacity
            or need.delivered != self.delivered
            or need.adapter_pages != adapter_pages
            or need.room_lacked != self.room_lacked
        ):
            most = self._max_pages(capacity)
            promise = self._promise(capacity, config, adapter_pages, most)
            never = self._never_fits(capacity, adapter_pages, most)
            room, times = promise.pages, self.room_lacked
            if times:
                room = max(room, min(room * (1 + times), capacity.pages - adapter_pages))
            need = self.need = Requirement(capacity, self.delivered, adapter_pages, never, promise, room, times)
        return need

    def _never_fits(self, capacity: Capacity, adapter_pages: int, most: int) -> str:
        if self.prompt_tokens + max(self.delivered, 1) > capacity.max_model_length:
            return (
                f"the prompt has {self.prompt_tokens} tokens and the model's context is "
                f"{capacity.max_model_length}; shorten the prompt"
            )
        if most + adapter_pages > capacity.pages:
            beside = f" beside its adapter's {adapter_pages}" if adapter_pages else ""
            return (
                f"prompt and max_tokens may need {most} pages of {capacity.page_tokens} tokens{beside} and a runner "
                f"holds {capacity.pages}; lower max_tokens or raise the pool's kvCacheMiB"
            )
        return ""

    def promise_on(self, capacity: Capacity, config: SchedulerConfig, adapter_pages: int = 0) -> Promise:
        """By the rule of the runner's preset and its quantile of the estimate. `force_promise_pages` (tests) sets the
        pages of one request in `force_promise_each` instead, if the prompt fits in them."""
        return self._promise(capacity, config, adapter_pages, self._max_pages(capacity))

    def _promise(self, capacity: Capacity, config: SchedulerConfig, adapter_pages: int, most: int) -> Promise:
        if config.force_promise_pages and self.sequence % config.force_promise_each == 0:
            known = capacity.pages_for(self.prompt_tokens + self.delivered + 1)
            pages = min(max(config.force_promise_pages, known), most)
        else:
            pages = promises.pages_by_rule(
                capacity.promise_rule,
                self.prompt_tokens,
                self.max_tokens,
                delivered=self.delivered,
                expected=self.estimate.quantile(capacity.promise_quantile),
                context_tokens=capacity.max_model_length,
                page_tokens=capacity.page_tokens,
            )
            pages = min(pages, max(capacity.pages - adapter_pages, most))
        return Promise(pages, min(pages * capacity.page_tokens, self._max_kv_tokens(capacity)))

    def _max_kv_tokens(self, capacity: Capacity) -> int:
        context = capacity.max_model_length
        return promises.max_kv_tokens(self.prompt_tokens, self.max_tokens, context_tokens=context)

    def _max_pages(self, capacity: Capacity) -> int:
        return promises.max_pages(
            self.prompt_tokens,
            self.max_tokens,
            context_tokens=capacity.max_model_length,
            page_tokens=capacity.page_tokens,
        )

    def avoids(self, instance: str, now: float) -> bool:
        return self.avoid.get(instance, 0.0) > now
