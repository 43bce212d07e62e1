"""What is simulated, and the names of those who take part."""

from dataclasses import dataclass, field
from typing import Literal

from motet_scheduler.policy.values import GroupName, SchedulerConfig
from motet_simulator.profiles.profile import Profile
from motet_supervisor.policy.values import SupervisorConfig

GROUP = GroupName("default/plan")
GATEWAY = "gateway"
INCARNATION = "1"
"""Of each runner."""

MESSAGE_SECONDS = 0.0005
"""Between scheduler, supervisor and runners."""

Lengths = Literal["answers", "exact", "max_tokens"]
"""How the gateway estimates the length of an answer: by the answers that it has seen of the same tenant and adapter, as
without a predictor; as if it knew; or by `max_tokens` alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated."""

    profile: Profile
    runners: int
    seed: int = 0
    lengths: Lengths = "answers"
    max_tokens: int = 1024
    """Of requests that do not say."""
    rank: int = 16
    """Of all adapters."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    shrinks: bool = False
    """Whether an autoscaler may remove runners, so that the scheduler empties them (PU-18). None is removed here."""
    leaps: bool = True
