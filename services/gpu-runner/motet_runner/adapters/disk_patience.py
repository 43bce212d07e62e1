"""How long the runner's own disk may take for calls on an adapter's files."""

from dataclasses import dataclass

from motet.errors import AdapterFetchFailed
from motet_runner.daemon_threads import CallHangs
from motet_runner.sources.fetch_errors import temporary

SLOWEST_BYTES_PER_SECOND = 16 << 20
"""The rate of a busy network disk. A slower one counts as hanging."""


@dataclass(frozen=True, slots=True)
class DiskPatience:
    stall_seconds: float
    """The limit of a call that reads and writes no weights."""

    def seconds_for(self, size: int) -> float:
        """The limit of a call that reads or writes `size` bytes."""
        return self.stall_seconds + size / SLOWEST_BYTES_PER_SECOND


def disk_hangs(hung: CallHangs) -> AdapterFetchFailed:
    return temporary(
        f"This runner's disk cache does not answer: nothing came of a call for {hung.seconds:g} s. Motet tries again "
        "automatically. See whether the disk is well."
    )
