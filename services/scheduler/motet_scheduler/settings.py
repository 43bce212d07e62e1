"""The scheduler's own settings, MOTET_SCHEDULER_<FIELD> in the environment."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from motet_scheduler.policy.values import SchedulerConfig


class Settings(BaseSettings):
    """The numbers that decide. Seconds are multiplied by MOTET_TIME_SCALE."""

    model_config = SettingsConfigDict(env_prefix="MOTET_SCHEDULER_", frozen=True, extra="ignore")

    queue_limit: int = Field(10_000, ge=1)
    """Requests that may wait for one base model. Past it new ones are refused at once (`pool_saturated`): a client that
    would wait for minutes is better told to come back."""

    max_passed_over: int = Field(64, ge=1)
    """How many younger or less urgent requests may go before one that does not fit yet. Then nothing of its class, and
    nothing less urgent, is placed until it has gone; more urgent requests are. Small values waste room, large ones let
    long requests wait."""

    tenants_examined: int = Field(32, ge=1)
    """When the oldest request does not fit, how many other tenants' oldest ones are tried, per class. Bounds the work
    of one decision."""

    settle_seconds: float = Field(0.5, ge=0)
    """After a start, how long to wait for the runners that were there before, so that nothing is placed on memory that
    is in use. Ends as soon as all of them have attached."""

    unsubmitted_seconds: float = Field(2.0, gt=0)
    """A placement that its runner does not list is given up after two reports and this long: it never arrived."""

    unlisted_seconds: float = Field(10.0, gt=0)
    """A placement that its runner's reports do not list for so long, and of which its gateway says nothing, is taken
    back, and the request is placed again. Longer than a gateway's `connect_seconds` and a few reports, so that whoever
    knows better has spoken by then."""

    avoid_seconds: float = Field(0.1, gt=0)
    """How long a runner that declined or lost a request is not asked again by it. Doubles each time, up to twenty times
    this."""

    forget_runner_seconds: float = Field(30.0, gt=0)
    """A runner whose stream has been down for so long is taken off the books."""

    ensure_seconds: float = Field(10.0, gt=0)
    """An order to check or load an adapter that brought no word for so long is given again."""

    revision_seconds: float = Field(10.0, ge=0)
    """Three changes of an adapter are looked at as they come; one that goes on changing is looked at once in so long,
    as it is by then. 0: every change at once."""

    force_promise_pages: int = Field(0, ge=0)
    """For tests of overflow: a first promise is exactly so many pages, whatever the estimate says, unless prompt and
    first token need more or the request's whole life needs fewer. 0: the estimate decides."""

    capacity_seconds: float = Field(1.0, gt=0)
    """How often it is worked out how many runners each pool should have."""

    queue_patience_seconds: float = Field(5.0, gt=0)
    """A request that has waited for a place for so long asks for one more runner, whatever the sums say, unless one is
    already starting."""

    report_patience_seconds: float = Field(10.0, gt=0)
    """While a runner of a pool has not reported for so long, no runner of that pool is advised away; nor for so long
    after a start, while some have not come back."""

    growth_seconds: float = Field(30.0, gt=0)
    """A pool is advised to double at most once in so long."""

    timelines: int = Field(2_000, ge=1)
    """How many ended requests' timelines are kept for `Explain`, besides those of all that wait or run."""

    def config(self, time_scale: float) -> SchedulerConfig:
        return SchedulerConfig(
            queue_limit=self.queue_limit,
            max_passed_over=self.max_passed_over,
            tenants_examined=self.tenants_examined,
            startup_wait=self.settle_seconds * time_scale,
            unsubmitted_timeout=self.unsubmitted_seconds * time_scale,
            unlisted_timeout=self.unlisted_seconds * time_scale,
            avoid_after_decline=self.avoid_seconds * time_scale,
            avoid_longest=20 * self.avoid_seconds * time_scale,
            forget_runner=self.forget_runner_seconds * time_scale,
            load_retry=self.ensure_seconds * time_scale,
            revision_pause=self.revision_seconds * time_scale,
            force_promise_pages=self.force_promise_pages,
            capacity_every=self.capacity_seconds * time_scale,
            queue_patience=self.queue_patience_seconds * time_scale,
            report_patience=self.report_patience_seconds * time_scale,
            growth_window=self.growth_seconds * time_scale,
            timelines=self.timelines,
        )
