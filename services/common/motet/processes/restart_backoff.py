"""How long a process that died waits before it is started again: longer with each death in a row. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartBackoff:
    """Times in seconds."""

    first_delay: float = 0.5
    """The wait before the second restart in a row. It doubles with each further one. The first restart comes at once,
    so that a process that was healthy and got killed is back soon, unless its spec asks for a wait."""

    last_delay: float = 30.0
    """The longest wait."""

    stable_after: float = 10.0
    """After a process was ready and ran for this long, its earlier deaths no longer count."""

    def scaled(self, factor: float) -> "RestartBackoff":
        return RestartBackoff(
            first_delay=self.first_delay * factor,
            last_delay=self.last_delay * factor,
            stable_after=self.stable_after * factor,
        )

    def delay(self, failures: int, *, needs_a_person: bool, jitter: float) -> float:
        """Seconds to wait after the `failures`-th death in a row. `jitter` (0 to 1) changes it by up to a quarter.

        `needs_a_person`: the process said that a person has to correct something, so also the first restart waits.
        """
        doublings = failures - (1 if needs_a_person else 2)
        if doublings < 0:
            return 0.0
        return min(self.first_delay * 2.0 ** min(doublings, 32), self.last_delay) * (0.75 + 0.5 * jitter)
