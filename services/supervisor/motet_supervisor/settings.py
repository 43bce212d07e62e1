"""The supervisor's own settings, MOTET_SUPERVISOR_<FIELD> in the environment."""

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from motet.domain import ParkMethod
from motet_supervisor.policy.values import SupervisorConfig


class Settings(BaseSettings):
    """When a runner counts as dead, and how requests give way. Seconds are multiplied by MOTET_TIME_SCALE."""

    model_config = SettingsConfigDict(env_prefix="MOTET_SUPERVISOR_", frozen=True, extra="ignore")

    heartbeat_seconds: float = Field(5.0, gt=0)
    """A runner whose reports have stopped for so long gets no new work. Five reports are due in that time."""

    hang_seconds: float = Field(20.0, gt=0)
    """An engine that has work and takes no step for so long, and for ten of its own slowest recent steps, is hung: its
    requests go on elsewhere. Longer than the slowest honest step, such as the first one of a cold model."""

    answer_seconds: float = Field(2.0, gt=0)
    """An order that has had no effect for so long is decided again."""

    resume_alone_seconds: float = Field(2.0, gt=0)
    """With the scheduler away, parked requests come back after so long, when there is room to spare."""

    resume_margin: float = Field(0.05, ge=0, lt=1)
    """The share of a runner's pages that must stay free when a request comes back without the scheduler."""

    overcommit: float = Field(1.0, ge=1.0, le=4.0)
    """Promises on a runner may add up to its pages times this; runners and schedulers are told. Above 1 more requests
    run at once, and some are parked when their predictions prove too short for all of them."""

    park_method: Literal["auto", "swap", "recompute"] = "auto"
    """How a parked request's KV is kept: copied to host memory, or dropped and computed again. `auto` takes the cheaper
    one by the runner's own measurements. What does not fit in host memory is computed again in any case."""

    def config(self, time_scale: float) -> SupervisorConfig:
        return SupervisorConfig(
            heartbeat=self.heartbeat_seconds * time_scale,
            hang=self.hang_seconds * time_scale,
            order_timeout=self.answer_seconds * time_scale,
            resume_without_scheduler=self.resume_alone_seconds * time_scale,
            resume_margin=self.resume_margin,
            overcommit=self.overcommit,
            park_method=None if self.park_method == "auto" else ParkMethod(self.park_method),
        )
