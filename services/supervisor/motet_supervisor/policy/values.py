"""Types that events and effects share."""

from dataclasses import dataclass

from motet.domain import ParkMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """The parameters of the policy. Times are seconds, with the time scale applied."""

    heartbeat: float = 2.0
    """A runner that sends nothing for this long is unhealthy."""
    most_heartbeats: float = 2.5
    """A runner may be silent for at most this many times as long: where this process runs late itself, so that others
    probably do, or if the runner sends only its reports, as earlier versions do."""
    lateness_factor: float = 4.0
    """By how many seconds more a runner may be silent for each second by which this process was late recently."""
    max_sleep: float = 0.4
    """While there are runners, a tick comes at least this often: it shows how late this process runs, and looks at what
    has no time of its own. A pause that no tick shows is shorter: it costs a runner no more than one heartbeat."""
    remind: float = 10.0
    """A runner that still hangs, or is still silent, is reported again this often."""
    forget: float = 50.0
    """A runner whose stream is down and that sends nothing for this long is forgotten."""
    hang: float = 20.0
    """An engine that has work and takes no step for this long hangs,"""
    hang_steps: float = 10.0
    """if that is also this many of its slowest recent steps: a slow engine does not hang."""
    slowest_step: float = 0.5
    """As a share of `hang`: no step counts for more, so that a slow engine that hangs is found, too."""
    order_timeout: float = 2.0
    """An order without effect for this long is decided again."""
    resume_without_scheduler: float = 2.0
    """Parked requests of runners without a scheduler resume after this wait, if enough pages are free."""
    resume_margin: float = 0.05
    """Share of a runner's pages that stays free when requests resume without the scheduler."""
    overcommit: float = 1.0
    """Promises on a runner may add up to its pages times this, at the most."""
    overcommit_window: float = 10.0
    """How often it is looked whether that is too far, at the most."""
    park_method: ParkMethod | None = None
    """None: the cheaper one."""
