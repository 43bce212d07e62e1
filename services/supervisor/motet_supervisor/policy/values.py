"""Words that events and effects share."""

from dataclasses import dataclass

from motet.domain import ParkMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """The numbers that decide. Times are seconds, already scaled by the process that hands them in."""

    heartbeat: float = 5.0
    """A runner that says nothing for so long is taken for dead."""
    hang: float = 20.0
    """An engine that has work and takes no step for so long is hung."""
    hang_steps: float = 10.0
    """And for so many of its own slowest recent steps: slow is not hung."""
    order_timeout: float = 2.0
    """How long an order may stay without effect before it is decided again."""
    resume_without_scheduler: float = 2.0
    """Without a scheduler, parked requests come back when they have waited so long and there is room."""
    resume_margin: float = 0.05
    """Share of a runner's pages that stays free when requests come back without the scheduler."""
    overcommit: float = 1.0
    """Promises on a runner may add up to its pages times this."""
    park_method: ParkMethod | None = None
    """None: the cheaper one."""
