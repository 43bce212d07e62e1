"""The scheduler's own settings, MOTET_SCHEDULER_<FIELD> in the environment."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from motet.addresses import Address
from motet_scheduler.policy.values import SchedulerConfig

POSITIONS_SECONDS = 1.0
LOOK_AGAIN_SECONDS = 0.1


class Settings(BaseSettings):
    """The parameters of scheduling. Seconds are multiplied by MOTET_TIME_SCALE."""

    model_config = SettingsConfigDict(env_prefix="MOTET_SCHEDULER_", frozen=True, extra="ignore")

    listen: Address = ""
    """Where this scheduler listens, if that is not MOTET_SCHEDULER_ADDRESS. In a cluster it listens on every address of
    its pod, and that setting is the one address to which standbys send their callers."""

    record: str = ""
    """A file for one JSON line per event that the scheduler's policy is told, with its time: `motet replay` decides
    again from it. It grows for as long as the scheduler runs, by a few kilobytes for each report of a runner."""

    queue_limit: int = Field(10_000, ge=1)
    """The most requests that may wait for one base model. Above it new requests are refused at once (`pool_saturated`):
    it is better to tell a client to come back than to let it wait for minutes. A tenant that has less than an equal
    part of them still gets in, until twice as many wait: nobody who fills the queue keeps others out."""

    max_passed_over: int = Field(64, ge=1)
    """How many later or less urgent requests may be placed before one that does not fit yet. After that one
    runner is reserved for it: nothing of its class, and nothing less urgent, is placed there before it. If it lacks an
    adapter slot alone, requests that need no other slot still take what it leaves. Smaller values leave memory unused,
    larger ones let long requests wait longer."""

    tenants_examined: int = Field(32, ge=1)
    """How many requests are tried at once, for each class, of those that were not tried yet or that other runners may
    take now. It bounds how long a decision takes."""

    output_token_cost: float = Field(2.0, gt=0, le=1000)
    """What a token of an answer costs in the shares of tenants, if one of a prompt costs 1. As soon as runners of a
    group have measured both, their median counts there, between 1 and 16."""

    standard_floor_percent: float = Field(10.0, ge=0, le=50)
    """How many percent of all placements class Standard gets at least while it waits, although interactive requests
    wait, too. A request that does not fit when its class has its turn gets none of them. 0: none."""

    batch_floor_percent: float = Field(3.0, ge=0, le=50)
    """The same for class Batch."""

    headroom_one_in: int = Field(32, ge=0)
    """Each runner keeps one place in this number, and the pages of a request, for tenants that were given less than the
    others that wait or run. So their requests need not wait until others end. While such places are in use and no more
    than three are free in the group, the next ones that come free on other runners are kept instead. 0: none."""

    settle_seconds: float = Field(0.5, ge=0)
    """How long the scheduler waits after its start for the runners that were there before, so that it places nothing on
    memory that is in use. The wait ends as soon as all of them are connected."""

    unsubmitted_seconds: float = Field(2.0, gt=0)
    """When the reports of a runner have not listed a placement for this long, the placement never arrived there: the
    pages promised to it are free again. When they have listed for as long what its gateway does not know, it is
    cancelled."""

    unlisted_seconds: float = Field(10.0, gt=0)
    """When a runner's reports do not list a placement for this long, and its gateway reports nothing about it, the
    request is placed again. Must be longer than MOTET_GATEWAY_CONNECT_SECONDS and a few reports, so that a gateway that
    knows better can report first. If the runner says that the request has ended, its gateway has six times as long to
    read the rest. If the gateway is away, it has this long to come back."""

    avoid_seconds: float = Field(0.1, gt=0)
    """How long a request is not placed again on a runner that declined or lost it. Doubles each time, up to twenty
    times this."""

    forget_runner_seconds: float = Field(30.0, gt=0)
    """How long a runner may be disconnected before the scheduler forgets it."""

    ensure_seconds: float = Field(10.0, gt=0)
    """When a runner has reported nothing about an order to check or load an adapter for this long, the order is sent
    again."""

    revision_seconds: float = Field(10.0, ge=0)
    """The first three changes of an adapter are checked as they come. If it goes on changing, it is checked once in
    this time, in its newest state. 0: every change is checked at once."""

    residency_seconds: float = Field(1.0, ge=0)
    """The operator and the gateways are told at most this often which adapters are in the memory of which runners.
    Other changes are told at once."""

    force_promise_pages: int = Field(0, ge=0)
    """For tests of overflow: a request's first promise is exactly this many pages, unless its prompt and first token
    need more or the whole request needs fewer. 0: the estimate decides."""

    force_promise_each: int = Field(1, ge=1)
    """`force_promise_pages` is the promise of one request in this number; the estimate decides for the others."""

    capacity_seconds: float = Field(1.0, gt=0)
    """How often the scheduler works out how many runners each pool should have, and moves requests away from one that
    could leave."""

    queue_patience_seconds: float = Field(5.0, gt=0)
    """When a request has been in the queue for this long, the scheduler advises one more runner than it has computed,
    unless one is already starting. Smaller values let pools grow earlier."""

    report_patience_seconds: float = Field(10.0, gt=0)
    """While a runner of a pool has not reported for this long, the scheduler does not advise fewer runners for that
    pool. The same holds for this long after a start, while some runners have not come back; the operator keeps the
    statuses of their group's adapters meanwhile."""

    growth_seconds: float = Field(30.0, gt=0)
    """The scheduler advises a pool to double at most once in this time. Smaller values let pools grow faster."""

    timelines: int = Field(2_000, ge=1)
    """How many timelines of ended requests are kept for `Explain`, besides those of all requests that wait or run."""

    def config(self, time_scale: float) -> SchedulerConfig:
        return SchedulerConfig(
            queue_limit=self.queue_limit,
            max_passed_over=self.max_passed_over,
            tenants_examined=self.tenants_examined,
            output_token_cost=self.output_token_cost,
            standard_floor=self.standard_floor_percent / 100,
            batch_floor=self.batch_floor_percent / 100,
            headroom_one_in=self.headroom_one_in,
            startup_wait=self.settle_seconds * time_scale,
            unsubmitted_timeout=self.unsubmitted_seconds * time_scale,
            unlisted_timeout=self.unlisted_seconds * time_scale,
            avoid_after_decline=self.avoid_seconds * time_scale,
            max_avoid=20 * self.avoid_seconds * time_scale,
            forget_runner=self.forget_runner_seconds * time_scale,
            load_retry=self.ensure_seconds * time_scale,
            check_patience=30 * self.ensure_seconds * time_scale,
            revision_pause=self.revision_seconds * time_scale,
            residency_pause=self.residency_seconds * time_scale,
            force_promise_pages=self.force_promise_pages,
            force_promise_each=self.force_promise_each,
            capacity_every=self.capacity_seconds * time_scale,
            repeat_advice=10 * self.capacity_seconds * time_scale,
            queue_patience=self.queue_patience_seconds * time_scale,
            report_patience=self.report_patience_seconds * time_scale,
            growth_window=self.growth_seconds * time_scale,
            positions_every=POSITIONS_SECONDS * time_scale,
            look_again=LOOK_AGAIN_SECONDS * time_scale,
            timelines=self.timelines,
        )
