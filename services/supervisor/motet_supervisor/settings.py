"""The supervisor's own settings, MOTET_SUPERVISOR_<FIELD> in the environment."""

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from motet.domain import ParkMethod
from motet.ledger import MAX_OVERCOMMIT, MIN_OVERCOMMIT
from motet_supervisor.policy.values import SupervisorConfig

MAX_SLEEP_SECONDS, REMIND_SECONDS, FORGET_SECONDS, OVERCOMMIT_WINDOW_SECONDS = 0.4, 10.0, 50.0, 10.0
"""The longest time between two ticks, how often a hang is reported again, when a runner whose stream is down is
forgotten, and how often the overcommit may change, before the time scale."""


class Settings(BaseSettings):
    """When a runner is unhealthy, and how requests are parked. Seconds are multiplied by MOTET_TIME_SCALE."""

    model_config = SettingsConfigDict(env_prefix="MOTET_SUPERVISOR_", frozen=True, extra="ignore")

    record: str = ""
    """A file for one JSON line per event that the supervisor's policy is told, with its time: `motet replay` decides
    again from it. It grows for as long as the supervisor runs."""

    heartbeat_seconds: float = Field(2.0, gt=0)
    """A runner that has sent nothing for this long is unhealthy: it gets no new requests, and if the scheduler hears
    nothing of it either, its requests continue on other runners. Five heartbeats are due in this time. Time in which
    the supervisor itself did not run does not count, and while it runs late, runners have up to two and a half times as
    long."""

    hang_seconds: float = Field(20.0, gt=0)
    """An engine hangs when it has work and takes no step, and reads no part of an adapter, for this long, and for as
    long as ten of its own slowest recent steps: its requests continue on other runners. Must be longer than the slowest
    normal step, such as the first one of a cold model."""

    answer_seconds: float = Field(2.0, gt=0)
    """When an order to a runner has had no effect for this long, the supervisor decides again."""

    resume_alone_seconds: float = Field(2.0, gt=0)
    """While no scheduler is connected to the supervisor, or none to a runner, the parked requests there resume after
    this time, as soon as there is memory for them."""

    resume_margin: float = Field(0.05, ge=0, lt=1)
    """The share of a runner's KV pages, 0 to 1, that must stay free when a request resumes without the scheduler."""

    overcommit: float = Field(1.0, ge=MIN_OVERCOMMIT, le=MAX_OVERCOMMIT)
    """Promises on a runner may add up to its KV pages times this, at the most; runners and schedulers are told. Above 1
    more requests run at once, and some are parked when their predictions are too short for all of them. While more than
    one in twenty of the requests that end was parked, the supervisor lowers the factor, down to 1, and raises it again
    when hardly any was."""

    park_method: Literal["auto", "swap", "recompute"] = "auto"
    """What happens to a parked request's KV. `swap`: it is copied to host memory. `recompute`: it is dropped and
    computed again. `auto`: what takes less time by the runner's own measurements. What does not fit in host memory is
    always computed again. Runners that admit by a forecast, as the preset `paged-chunk` does, park by themselves and
    always choose as `auto` does."""

    def config(self, time_scale: float) -> SupervisorConfig:
        return SupervisorConfig(
            heartbeat=self.heartbeat_seconds * time_scale,
            max_sleep=MAX_SLEEP_SECONDS * time_scale,
            remind=REMIND_SECONDS * time_scale,
            forget=FORGET_SECONDS * time_scale,
            hang=self.hang_seconds * time_scale,
            order_timeout=self.answer_seconds * time_scale,
            resume_without_scheduler=self.resume_alone_seconds * time_scale,
            resume_margin=self.resume_margin,
            overcommit=self.overcommit,
            overcommit_window=OVERCOMMIT_WINDOW_SECONDS * time_scale,
            park_method=None if self.park_method == "auto" else ParkMethod(self.park_method),
        )
